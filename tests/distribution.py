"""Check what is built for a release: metadata, contents, every Python at hand in an empty environment, every extra.

Run by ``make dist-check`` after ``make dist``; it takes some minutes, and downloads what it installs.
"""

import argparse
import email
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PIP = ["-m", "pip", "--disable-pip-version-check", "--quiet"]
OF_SDIST = ["CHANGELOG.md", "CITATION.cff", "LICENSE", "README.md", "constraints.txt", "pyproject.toml", "setup.py"]
OF_SDIST += ["recipe/recipe.yaml", "recipe/smoke.py"]
NOT_OF_SDIST = ("tests/", "results/", "experiments/", "benchmarks/", "docs/")
PARTS = ["contents", "metadata", "pythons", "extras"]


def run(*command: object) -> str:
    """Run a command outside of the repository, without its path, and return what it prints."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    with tempfile.TemporaryDirectory() as folder:
        found = subprocess.run(
            [str(part) for part in command],
            cwd=folder,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
        )
    if found.returncode:
        sys.exit(f"{' '.join(map(str, command))}\n{found.stdout}\nended with {found.returncode}.")
    return found.stdout.strip()


def require(holds: bool, message: str) -> None:
    if not holds:
        sys.exit(message)


def built(folder: Path) -> tuple[Path, Path]:
    wheels, sdists = sorted(folder.glob("*.whl")), sorted(folder.glob("*.tar.gz"))
    require(len(wheels) == len(sdists) == 1, f"{folder} must hold one wheel and one sdist; run make dist.")
    return wheels[0], sdists[0]


def check_contents(wheel: Path, sdist: Path) -> None:
    modules = {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src/sublaplace").rglob("*.py")}
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        licences = [name for name in archive.namelist() if name.endswith("LICENSE")]
    require(names == modules | {"sublaplace/py.typed"}, f"The wheel holds others: {names ^ modules}.")
    require(len(licences) == 1, "The wheel does not hold the licence.")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    missing = ({f"src/{name}" for name in modules} | set(OF_SDIST)) - names
    extra = {name for name in names if name.startswith(NOT_OF_SDIST)}
    require(not missing and not extra, f"The sdist lacks {missing}, and should not hold {extra}.")
    print(f"contents: {len(modules)} modules in both")


def check_metadata(wheel: Path, sdist: Path) -> None:
    print(run(sys.executable, "-m", "twine", "check", "--strict", wheel, sdist))
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(name))
    text = metadata.get_payload(decode=True).decode()
    relative = re.findall(r"\]\((?!\w+:|#)[^)]*\)", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    require(not relative, f"The long description has relative links: {relative[:3]}.")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    require(set(metadata.get_all("Provides-Extra")) == set(project["optional-dependencies"]), "Extras are missing.")
    require(set(metadata.get_all("Classifier")) == set(project["classifiers"]), "Classifiers are missing.")
    version = metadata["Version"]
    if "dev" not in version:
        require(f"## [{version}]" in (ROOT / "CHANGELOG.md").read_text(), f"CHANGELOG.md has no section {version}.")
        require(f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text(), "CITATION.cff has another version.")
        require(bool(metadata.get_all("Project-URL")), "A release needs SUBLAPLACE_REPOSITORY=https://… make dist.")
    urls = metadata.get_all("Project-URL") or ["none: built without SUBLAPLACE_REPOSITORY"]
    print(f"metadata: version {version}; addresses: {'; '.join(urls)}")


def check_pythons(wheel: Path, pythons: list[str]) -> None:
    done = 0
    for python in pythons:
        if shutil.which(python) is None or subprocess.run([python, "-c", ""], capture_output=True).returncode:
            print(f"{python}: not at hand")
            continue
        with tempfile.TemporaryDirectory() as folder:
            run(python, "-m", "venv", folder)
            own = Path(folder) / "bin" / "python"
            run(own, *PIP, "install", "-c", ROOT / "constraints.txt", wheel)
            run(own, *PIP, "check")
            print(f"{python}: {run(own, '-I', ROOT / 'recipe/smoke.py').splitlines()[0]}")
        done += 1
    require(done > 0, "No Python was at hand.")


def check_extras(wheel: Path, python: str) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    with tempfile.TemporaryDirectory() as folder:
        run(python, "-m", "venv", folder)
        own = Path(folder) / "bin" / "python"
        for extra in extras:
            wanted = f"sublaplace[{extra}] @ {wheel.resolve().as_uri()}"
            run(own, *PIP, "install", "--dry-run", "-c", ROOT / "constraints.txt", wanted)
            print(f"sublaplace[{extra}]: resolves")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dist", type=Path, default=ROOT / "dist")
    parser.add_argument("--pythons", nargs="+", default=["python3.11", "python3.12", "python3.13"])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    chosen = parser.parse_args()
    wheel, sdist = built(chosen.dist)
    if "contents" in chosen.only:
        check_contents(wheel, sdist)
    if "metadata" in chosen.only:
        check_metadata(wheel, sdist)
    if "pythons" in chosen.only:
        check_pythons(wheel, chosen.pythons)
    if "extras" in chosen.only:
        check_extras(wheel, chosen.pythons[0])


if __name__ == "__main__":
    main()
