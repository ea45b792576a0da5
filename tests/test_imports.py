"""Who may import whom, and that every package is packaged."""

import ast
import re
import tomllib
from pathlib import Path

import pytest

import specgym.engine

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("engine", "envs", "agents", "baselines", "runs")
DATA_SUFFIXES = {".json", ".jsonl", ".safetensors"}
FORBIDDEN = {
    "engine": {"envs", "agents", "baselines", "runs"},
    "envs": {"agents", "baselines", "runs"},
    "agents": {"engine", "envs", "runs"},
    "baselines": {"engine", "envs", "agents", "runs"},
    "runs": set(),
}
FOREIGN = {  # libraries that a package does without
    "engine": {"gymnasium", "stable_baselines3", "sb3_contrib", "tensorboard", "tyro"},
    "envs": {"stable_baselines3", "sb3_contrib", "tensorboard", "tyro", "transformers"},
    "agents": {"transformers", "tyro"},
    "baselines": {"torch", "transformers", "stable_baselines3", "tyro"},
    "runs": set(),
}


def imported(path):
    """Every module a file imports, anywhere in it, under type checking too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import in line {node.lineno}"
            yield node.module
            if node.module == "specgym":
                yield from (f"specgym.{alias.name}" for alias in node.names)


def modules(package):
    return sorted((ROOT / package).rglob("*.py"))


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_point_one_way(package):
    assert modules(package)
    for path in modules(package):
        for name in imported(path):
            top, _, rest = name.partition(".")
            folder = rest.split(".")[0] if top == "specgym" else None
            assert folder not in FORBIDDEN[package], f"{path.name} imports {name}"
            assert top not in FOREIGN[package], f"{path.name} imports {name}"
            assert top not in PACKAGES, f"{path.name}: import specgym.{name}, not {name}"


def test_the_import_check_sees_every_form(tmp_path):
    source = """
import a.b, c
from d.e import f
from specgym import engine
if TYPE_CHECKING:
    from g import h
def late():
    import i
"""
    path = tmp_path / "source.py"
    path.write_text(source, encoding="utf-8")
    expected = ["a.b", "c", "d.e", "specgym", "specgym.engine", "g", "i"]
    assert sorted(imported(path)) == sorted(expected)
    path.write_text("from . import b", encoding="utf-8")
    with pytest.raises(AssertionError, match="relative import"):
        list(imported(path))


def test_packages_of_pyproject_are_those_of_the_tree():
    """An unlisted package works in an editable install and is missing from the wheel."""
    config = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    options = config["tool"]["setuptools"]
    outside = {"tests", "build", "dist"}
    tree = {
        path.parent.relative_to(ROOT)
        for path in ROOT.rglob("__init__.py")
        if not any(part.startswith(".") for part in path.relative_to(ROOT).parts)
        and path.relative_to(ROOT).parts[0] not in outside
    }
    expected = {".".join(("specgym", *folder.parts)): folder.as_posix() for folder in tree}
    assert sorted(options["packages"]) == sorted(expected)
    assert options["package-dir"] == expected
    assert {name.split(".")[1] for name in expected} == set(PACKAGES)


@pytest.mark.parametrize("package", PACKAGES)
def test_data_files_of_a_package_are_packaged(package):
    config = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    listed = config["tool"]["setuptools"]["package-data"].get(f"specgym.{package}", [])
    home = ROOT / package
    packaged = {path for pattern in listed for path in home.glob(pattern)}
    assert all(any(home.glob(pattern)) for pattern in listed)
    data = {p for p in home.glob("*") if p.suffix in DATA_SUFFIXES}  # deeper lies runs' output
    assert data <= packaged


def test_only_the_text_api_is_named_where_it_may_not_be_imported():
    """``specgym.engine`` finds ``Engine`` and ``hf_generate`` in runs, but only when asked."""
    named = {}
    for path in modules("engine"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found = re.fullmatch(r"specgym\.(envs|agents|baselines|runs)(\.\w+)*", node.value)
                named |= {node.value: path.name} if found else {}
    modules_of_text = ("specgym.runs.text.engine_api", "specgym.runs.text.hf")
    assert named == dict.fromkeys(modules_of_text, "__init__.py")
    assert specgym.engine.Engine.__module__ == "specgym.runs.text.engine_api"
    assert specgym.engine.hf_generate.__module__ == "specgym.runs.text.hf"


def unpickling(path):
    """Lines of a file that read a pickle, or could."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call):
            continue
        name, given = ast.unparse(node.func), {k.arg: ast.unparse(k.value) for k in node.keywords}
        is_safe = (
            name not in ("torch.load", "VecNormalize.load")
            and not name.endswith((".load_replay_buffer", ".save_replay_buffer"))
            and given.get("allow_pickle", "False") == "False"
        ) or (name == "torch.load" and given.get("weights_only") == "True")
        if not is_safe:
            yield f"{path.name}, line {node.lineno}: {name}"


@pytest.mark.parametrize("package", PACKAGES)
def test_nothing_is_unpickled(package):
    """But for stable-baselines3's zips, which it reads itself when a training goes on."""
    for path in modules(package):
        assert not set(imported(path)) & {"pickle", "cloudpickle", "dill", "shelve", "marshal"}
        assert list(unpickling(path)) == []


def test_the_pickle_check_sees_every_form(tmp_path):
    path = tmp_path / "source.py"
    for source in ("torch.load(p)", "np.load(p, allow_pickle=True)", "m.load_replay_buffer(p)"):
        path.write_text(source, encoding="utf-8")
        assert len(list(unpickling(path))) == 1
    path.write_text("torch.load(p, weights_only=True), np.load(p)", encoding="utf-8")
    assert list(unpickling(path)) == []
