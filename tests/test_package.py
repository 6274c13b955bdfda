"""The distribution as a user gets it."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TREES = {"rlinf_plugins": ROOT / "rlinf_plugins", "rlinf_verl": ROOT / "integrations" / "verl" / "rlinf_verl"}


def files_of_the_tree() -> set[str]:
    kept = (".py", ".yaml", ".typed")
    return {
        f"{package}/{path.relative_to(tree).as_posix()}"
        for package, tree in TREES.items()
        for path in tree.rglob("*")
        if path.suffix in kept or path.name == "py.typed"
    }


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    subprocess.run(["git", "-C", str(ROOT), "ls-files", "-z"], check=True, capture_output=True)
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split("\0")
    for name in filter(None, listed):
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder / "dist"), str(source)],
        check=True,
        capture_output=True,
    )
    (built,) = (folder / "dist").glob("*.whl")
    return built


@pytest.mark.slow
def test_the_wheel_holds_exactly_the_tree(wheel):
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert packed == files_of_the_tree()


@pytest.mark.slow
def test_the_wheel_installs_and_answers(wheel, tmp_path):
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(tmp_path), str(wheel)],
        check=True,
        capture_output=True,
    )
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import rlinf_plugins, rlinf_verl, importlib.metadata as m\n"
        "assert rlinf_plugins.__file__.startswith(sys.argv[1]) and rlinf_verl.__file__.startswith(sys.argv[1])\n"
        "names = {e.name for e in m.distribution('rlinf-plugins').entry_points if e.group == 'verl.plugins'}\n"
        "print(names, rlinf_plugins.__version__)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert done.stdout.startswith("{'rlinf'} 0.1"), done.stderr


def test_importing_is_cheap():
    code = (
        "import sys, time; start = time.process_time(); import rlinf_plugins; spent = time.process_time() - start\n"
        "print(spent, 'torch' in sys.modules, 'ray' in sys.modules)"
    )
    best = 1e9
    for _ in range(3):
        out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
        assert out[1:] == ["False", "False"]
        best = min(best, float(out[0]))
    assert best < 0.3


def test_no_machine_path_or_registry_host_is_committed():
    pattern = r"(/t[m]p/|/w[o]rk/|/r[o]ot/|/h[o]me/[a-z])|f[i]les\.pythonhosted|p[y]pi\.org/simple"
    found = subprocess.run(
        ["git", "-C", str(ROOT), "grep", "-nE", pattern, "--", ".", ":!tests"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.stdout == ""
