"""``specgym pool show RECIPE`` and ``pool list`` without weights and without a network."""

import socket

import huggingface_hub.constants
import pytest
from rich.console import Console

from specgym.engine.pools.recipes import RECIPES
from specgym.engine.testing import tiny_llama, tiny_tokenizer
from specgym.runs.cli import main
from specgym.runs.pool.recipe_table import find_missing, list_recipes


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    """No network: a look at it fails the test. The hub's cache is empty."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))

    def refuse(*_, **__):
        pytest.fail("the network was looked at")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.mark.parametrize("name", RECIPES)
def test_show_prints_what_a_recipe_needs(name, capsys):
    assert main(["pool", "show", name]) == 0
    shown = capsys.readouterr().out
    for member in RECIPES[name].members.values():
        assert f"{member.source}, not on this machine (licence: {member.licence}" in shown
        assert member.architecture in shown
    for chain in RECIPES[name].chains:
        assert ">".join(chain) in shown.replace("\n", " ")
    assert f'specgym compare --pool "{name}"' in shown
    assert f'"{name}:{",".join(f"{each}=PATH" for each in RECIPES[name].members)}"' in shown
    assert "…" not in shown


def test_show_states_sizes_totals_and_gates(capsys):
    assert main(["pool", "show", "llama-2"]) == 0
    rows = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "small Llama 68 M 68 M 0.27 GB 0.14 GB" in rows
    assert "target Llama 6.74 B 6.74 B 13.48 GB 13.48 GB" in rows
    assert "total 7.91 B 7.91 B 15.95 GB 15.81 GB" in rows
    gated = [row.partition(":")[0] for row in rows if "gated: accept it" in row]
    assert gated == ["target"]


def test_what_is_local_is_not_asked_for_again(tmp_path, capsys):
    (tmp_path / "head").mkdir()
    spec = f"mixtral:eagle={tmp_path / 'head'}"
    assert main(["pool", "show", spec]) == 0
    shown = capsys.readouterr().out
    assert f"eagle: {tmp_path / 'head'}, on this machine" in shown
    assert '"mixtral:target=PATH"' in shown


def test_a_recipe_whose_weights_are_here_is_shown_as_any_pool(tmp_path, capsys):
    tokenizer = tiny_tokenizer()
    tiny_llama(vocab_size=98, max_position_embeddings=1024).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    spec = f"olmoe:target={tmp_path}"
    assert find_missing(spec) is None
    assert main(["pool", "show", spec]) == 0
    assert "iteration without speculation" in capsys.readouterr().out


def test_list_has_the_recipes(capsys):
    list_recipes(Console(width=80))
    shown = capsys.readouterr().out
    for name, recipe in RECIPES.items():
        assert name in shown
        assert all(member.source in shown for member in recipe.members.values())


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("mixtrall", "nor a recipe (llama-2, llama-3, qwen3, mixtral"),
        ("mixtral:mid=x", 'like "mixtral:target=PATH"'),
    ],
)
def test_refusals_say_what_there_is(spec, message, capsys):
    assert main(["pool", "show", spec]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "source"),
    [("olmoe", "allenai/OLMoE-1B-7B-0924-Instruct"), ("mixtral", "yuhuili/EAGLE-mixtral")],
)
def test_using_a_recipe_without_its_weights_names_them_and_the_way_out(name, source, capsys):
    assert main(["generate", "--pool", name, "--prompt", "hi"]) == 1
    error = capsys.readouterr().err
    assert source in error
    assert "Check name and connection, or give a local folder" in error
