"""Runs notebooks from clean kernels; `python notebooks/execute.py` keeps in them what they show."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from queue import Empty
from typing import Any

import nbformat
from jupyter_client.asynchronous import AsyncKernelClient
from jupyter_client.channels import AsyncZMQSocketChannel
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

_POLL = 1.0  # seconds


class _Polling(AsyncZMQSocketChannel):
    """Asks again every second for messages.

    A socket of ZMQ tells once that something has arrived. nbclient answers the output widgets of `interact` by sending
    on the same socket, which can take that away from who waits: the cell would only end with its timeout.
    """

    async def get_msg(self, timeout: float | None = None) -> dict[str, Any]:
        until = None if timeout is None else time.monotonic() + timeout
        while True:
            left = _POLL if until is None else max(min(_POLL, until - time.monotonic()), 0)
            try:
                return await super().get_msg(left)
            except Empty:
                if until is not None and time.monotonic() >= until:
                    raise


class _Client(AsyncKernelClient):
    shell_channel_class = _Polling
    iopub_channel_class = _Polling


class _Manager(AsyncKernelManager):
    client_factory = _Client


def execute(path: Path, folder: Path) -> nbformat.NotebookNode:
    """The notebook as it is after a run from a clean kernel in `folder`, without the logs of others."""
    notebook = nbformat.read(path, as_version=4)
    environment = {name: value for name, value in os.environ.items() if name != "REMAT_DTR_LOGS"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[1])  # for `benchmarks`, wherever the folder is
    client = NotebookClient(
        notebook,
        kernel_manager_class=_Manager,
        kernel_name="python3",
        timeout=600,
        record_timing=False,
        resources={"metadata": {"path": str(folder)}},
    )
    client.execute(env=environment)
    return notebook


if __name__ == "__main__":
    here = Path(__file__).parent
    for path in [Path(name) for name in sys.argv[1:]] or sorted(here.glob("*.ipynb")):
        print(path.name, flush=True)
        notebook = execute(path, here)
        notebook.metadata.pop("language_info", None)  # the Python that it was run with, which may be any
        nbformat.write(notebook, path)
