import dataclasses
import io

import pytest

from specgym.engine.pools import loading
from specgym.runs.cli import main, split_lists
from specgym.runs.configs import CompareConfig, GenerateConfig
from specgym.runs.making import make_pool
from specgym.runs.settings import PoolSettings


def test_help_lists_the_commands(capsys):
    assert main(["--help"]) == 0
    assert "compare" in capsys.readouterr().out
    assert main([]) == 2
    assert main(["--version"]) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["comapre"], "no command 'comapre'"),
        (["compare", "--recipe", "lunch"], "no recipe 'lunch'"),
        (["compare", "--controllers", "none,none"], "named twice"),
        (["compare", "--num-requests", "0"], "num_requests"),
        (["compare", "--pool", "nonsense"], "nonsense"),
        (["compare", "--pool", "draft=x"], "target"),
        (["compare", "--name", "../up"], "name"),
        (["pool", "eat"], "no action 'eat'"),
        (["pool", "fetch", "other"], "not built in"),
        (["bench", "speed"], "no bench 'speed'"),
        (["generate", "--prompt", "  "], "must not be empty"),
        (["generate", "--prompt", "x", "--temperature", "-1"], "temperature"),
    ],
)
def test_refusals_say_what_and_how(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["compare", "--nonsense"], ["train", "dqn"]])
def test_unknown_flags_exit_with_usage(arguments, capsys):
    assert main(arguments) == 2
    assert "--help" in capsys.readouterr().err


def test_lists_take_commas_and_spaces():
    ways = (["--k-values", "1,2"], ["--k-values", "1", "2"], ["--k-values=1,2"])
    assert {tuple(split_lists(CompareConfig, way)) for way in ways} == {("--k-values", "1", "2")}
    assert split_lists(CompareConfig, ["--pool", "a=b,c=d"]) == ["--pool", "a=b,c=d"]
    assert split_lists(GenerateConfig, ["--stop", "a, b"]) == ["--stop", "a, b"]


def test_a_broken_prompt_file_is_named_with_line_and_field(tiny_spec, tmp_path, capsys):
    path = tmp_path / "broken.jsonl"
    path.write_text('{"prompt": "fine"}\n{"turns": []}\n')
    arguments = ["compare", "--pool", tiny_spec, "--prompts", str(path), "--runs", str(tmp_path)]
    assert main([*arguments, "--workload", "all", "--clock", "counting"]) == 2
    error = capsys.readouterr().err
    assert "broken.jsonl" in error
    assert "line 2" in error
    assert "turns" in error


def test_generate_streams_what_plain_decoding_gives(tiny_spec, capsys, monkeypatch):
    texts = []
    for controller in ("none", "static:draft@4", "specrouter"):
        monkeypatch.setattr("sys.stdin", io.StringIO("abc abc"))
        arguments = ["generate", "--pool", tiny_spec, "--dtype", "float32"]
        assert main([*arguments, "--max-new-tokens", "40", "--controller", controller]) == 0
        captured = capsys.readouterr()
        texts.append(captured.out)
        assert "tokens/s" in captured.err
    assert len(set(texts)) == 1
    assert len(texts[0]) > 10


def test_pool_commands_print(tiny_spec, capsys):
    assert main(["pool", "list"]) == 0
    assert "smollm2" in capsys.readouterr().out
    assert main(["pool", "show", tiny_spec]) == 0
    shown = capsys.readouterr().out
    assert "ngram>draft>target" in shown
    assert "draft" in shown


def test_compile_is_off_unless_it_is_asked_for(tiny_spec, monkeypatch):
    asked = []
    monkeypatch.setattr(
        loading, "accelerate", lambda _, graphs, compiled: asked.append((graphs, compiled))
    )
    settings = PoolSettings(pool=tiny_spec, dtype="float32")
    make_pool(settings)
    make_pool(dataclasses.replace(settings, compile=True))
    assert asked == [(True, False), (True, True)]
