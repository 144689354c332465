"""A tiny environment: a definition of the user's own, and a wheelhouse made here. No network, no large library."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml
from click.testing import CliRunner

from gpuflow.cli import cli
from gpuflow.cluster.commands import with_our_packages
from gpuflow.settings import Settings
from tests.gate import leftovers
from tests.support.waiting import patient

YAML_VERSION = metadata.version("PyYAML")


def make_wheel(folder: Path, name: str, version: str, files: Mapping[str, bytes], needs: str = "") -> Path:
    """Write a pure wheel of these files; `needs` is a package that it requires."""
    info = f"{name}-{version}.dist-info"
    entries = {
        **files,
        f"{info}/METADATA": (
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
            + (f"Requires-Dist: {needs}\n" if needs else "")
        ).encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = [
        f"{path},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b'=').decode()},{len(data)}"
        for path, data in entries.items()
    ]
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, data in entries.items():
            archive.writestr(path, data)
        archive.writestr(f"{info}/RECORD", "\n".join([*record, f"{info}/RECORD,,"]) + "\n")
    return wheel


def make_endless_sdist(folder: Path, name: str, version: str, told: Path) -> Path:
    """Write a source package whose build writes its process id to `told` and never ends."""
    backend = f"""
import os, signal
def get_requires_for_build_wheel(config_settings=None):
    return []
def prepare_metadata_for_build_wheel(*arguments, **options):
    with open({str(told)!r} + ".new", "w") as file:
        file.write(str(os.getpid()))
    os.rename({str(told)!r} + ".new", {str(told)!r})
    while True:
        signal.pause()
build_wheel = prepare_metadata_for_build_wheel
"""
    files = {
        "pyproject.toml": '[build-system]\nrequires = []\nbuild-backend = "endless"\nbackend-path = ["."]\n',
        "endless.py": backend,
        "PKG-INFO": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
    }
    path = folder / f"{name}-{version}.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for file, text in files.items():
            entry = tarfile.TarInfo(f"{name}-{version}/{file}")
            entry.size = len(text.encode())
            archive.addfile(entry, io.BytesIO(text.encode()))
    return path


def yaml_files() -> dict[str, bytes]:
    """Return the installed PyYAML, which children of ours need."""
    home = Path(yaml.__file__).parent
    return {f"yaml/{path.name}": path.read_bytes() for path in home.iterdir() if path.suffix in (".py", ".so")}


class Workshop:
    """A GPUFLOW_ENV_DIR with the definition `tiny`, and the command line run on it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.env_dir = root / "environments"
        self.env_dir.mkdir(parents=True)
        self.wheels = root / "wheels"
        make_wheel(self.wheels, "tinydep", "1.0", {"tinydep.py": b"ANSWER = 42\n"}, needs="unwanted")
        make_wheel(self.wheels, "unwanted", "1.0", {"unwanted.py": b""})
        make_wheel(self.wheels, "PyYAML", YAML_VERSION, yaml_files())
        self.settings = Settings.load(env={"GPUFLOW_ENV_DIR": str(self.env_dir)}, cwd=root)
        self.define()
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("GPUFLOW_", "PIP_"))}
        self.environment = with_our_packages(
            {**kept, **leftovers.passed_on(), "GPUFLOW_ENV_DIR": str(self.env_dir), "HOME": str(root)}
        )

    def define(self, name: str = "tiny", **changed: Any) -> None:
        recipe = {
            "steps": [["tinydep==1.0"], [f"PyYAML=={YAML_VERSION}"]],
            "uninstall": ["unwanted", "never-was-there"],
            "size_gb": 0.001,
            "env": {"TINY": "yes"},
            **changed.pop("recipe", {}),
        }
        data = {
            "description": "a tiny one",
            "task_types": {"tiny": ["tinydep"]},
            "variants": {"cpu": recipe},
            "check": {"imports": ["tinydep"], "timeout_seconds": 60},
            **changed,
        }
        (self.env_dir / f"{name}.yaml").write_text(yaml.safe_dump(data), "utf-8")

    def argv(self, *arguments: str) -> list[str]:
        return [sys.executable, "-c", "from gpuflow.cli import main; main()", "env", *arguments]

    def call(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run the command line in this process: for commands that build nothing."""
        env = {**dict.fromkeys(os.environ.keys() - self.environment.keys()), **self.environment, **variables}
        with contextlib.chdir(self.root):
            done = CliRunner().invoke(cli, ["env", *arguments], env=env)
        assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
        return subprocess.CompletedProcess(arguments, done.exit_code, done.stdout, done.stderr)

    def run(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            self.argv(*arguments),
            env={**self.environment, **variables},
            cwd=self.root,
            capture_output=True,
            text=True,
            timeout=patient(100),
            check=False,
        )
        assert "Traceback" not in done.stderr, done.stderr
        return done

    def start(self, *arguments: str, **options: Any) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.argv(*arguments),
            env=self.environment,
            cwd=self.root,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **options,
        )

    def create(self, name: str = "tiny", *options: str) -> subprocess.CompletedProcess[str]:
        return self.run("create", name, "--wheelhouse", str(self.wheels), *options)

    def status(self, name: str = "tiny") -> str:
        rows = json.loads(self.call("list", "--json").stdout)
        return next(row["status"] for row in rows if row["name"] == name)

    def folders(self, name: str = "tiny") -> list[Path]:
        """Return the virtual environments on disk, whole or not."""
        return sorted(path for path in (self.env_dir / name).glob("*") if path.is_dir())
