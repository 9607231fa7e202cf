"""Which folders grow while a launch downloads or compiles, from its own environment and command. Pure."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from hangguard.changes import value_of, words_of
from hangguard.facts import Launch

_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
"""``organisation/name`` of a model hub."""

TEMP = "/tmp"  # noqa: S108 - a name only
"""Where temporary files lie unless a launch says so. ``tempfile.gettempdir()`` would make a file there to try it."""

_NOT_IN_NAMES = re.compile(r'[\\/:*?"<>|]')


@dataclass(frozen=True, slots=True)
class Folder:
    """One folder that may grow. ``only``: names of the entries in it that are meant; empty: all."""

    path: str
    only: tuple[str, ...] = ()


def download_folders(launch: Launch, *, home: str) -> tuple[Folder, ...]:
    """Return where the models come in that the launch names.

    Of a hub's cache only the models that the command names are meant, for others may download into it too; where
    it names none as hubs do, all.
    """
    env = launch.environment()
    home = env.get("HOME") or home
    cache = env.get("XDG_CACHE_HOME") or f"{home}/.cache"
    hugging_face = env.get("HF_HOME") or f"{cache}/huggingface"
    # huggingface_hub/constants.py; the second name is the older one.
    hub = env.get("HF_HUB_CACHE") or env.get("HUGGINGFACE_HUB_CACHE") or f"{hugging_face}/hub"
    # modelscope/utils/file_utils.py: "hub" is a part of the default only.
    model_scope = env.get("MODELSCOPE_CACHE") or f"{cache}/modelscope"
    given = value_of(words_of(launch), "--download-dir")
    named = tuple(sorted({f"models--{name.replace('/', '--')}" for name in _repositories(launch.argv)}))
    folders = [Folder(hub, named), Folder(model_scope)]
    if given is not None:
        folders.insert(0, Folder(given, named))
    return _resolved(folders, launch.cwd, home)


def cache_folders(launch: Launch, *, home: str, user: str, temp: str) -> tuple[Folder, ...]:
    """Return where compiled kernels are put: by compilers, engines and the CUDA driver."""
    env = launch.environment()
    home = env.get("HOME") or home
    cache = env.get("XDG_CACHE_HOME") or f"{home}/.cache"
    temp = next((env[name] for name in ("TMPDIR", "TEMP", "TMP") if env.get(name)), temp)
    user = next((env[name] for name in ("LOGNAME", "USER", "LNAME", "USERNAME") if env.get(name)), user)
    vllm = env.get("VLLM_CACHE_ROOT") or f"{cache}/vllm"
    paths = (
        # torch/_inductor/runtime/cache_dir_utils.py
        env.get("TORCHINDUCTOR_CACHE_DIR") or f"{temp}/torchinductor_{_NOT_IN_NAMES.sub('_', user)}",
        env.get("TORCH_EXTENSIONS_DIR") or f"{cache}/torch_extensions",
        env.get("TRITON_CACHE_DIR") or f"{env.get('TRITON_HOME') or home}/.triton/cache",
        f"{env.get('FLASHINFER_WORKSPACE_BASE') or home}/.cache/flashinfer",
        env.get("DG_JIT_CACHE_DIR") or f"{home}/.deep_gemm",
        env.get("SGLANG_DG_CACHE_DIR") or f"{home}/.cache/deep_gemm",
        env.get("SGLANG_CACHE_DIR") or f"{home}/.cache/sglang",
        env.get("TVM_FFI_CACHE_DIR") or f"{home}/.cache/tvm-ffi",
        vllm,
        env.get("CUDA_CACHE_PATH") or f"{home}/.nv/ComputeCache",
    )
    return _resolved(map(Folder, paths), launch.cwd, home)


def _resolved(folders: Iterable[Folder], cwd: str, home: str) -> tuple[Folder, ...]:
    """Return them with whole paths; one that lies in another is left out, for it would count twice."""
    whole = [Folder(posixpath.normpath(posixpath.join(cwd, _expanded(f.path, home))), f.only) for f in folders]
    return tuple(
        folder
        for index, folder in enumerate(whole)
        if not any(
            _contains(other, folder) and (other.path != folder.path or position < index)
            for position, other in enumerate(whole)
        )
    )


def _contains(outer: Folder, inner: Folder) -> bool:
    return inner.path == outer.path or (not outer.only and inner.path.startswith(outer.path.rstrip("/") + "/"))


def _expanded(path: str, home: str) -> str:
    return home + path[1:] if path == "~" or path.startswith("~/") else path


def _repositories(argv: tuple[str, ...]) -> Iterator[str]:
    for word in argv:
        for part in (word, word.partition("=")[2]):
            if _REPOSITORY.fullmatch(part) and not part.startswith((".", "/")):
                yield part
