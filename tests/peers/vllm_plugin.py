"""Runs vLLM's own server tests against our server: a pytest plugin for vLLM's Python that replaces the launcher only.

Tests that never start a server are left out: they say something about vLLM's code, not about ours.
"""

import inspect
import sys
from pathlib import Path
from typing import Any

import vllm
import vllm.distributed
from launcher import Launcher, launcher_for
from record import Recorder


def pytest_addoption(parser: Any) -> None:
    """Take where our server is and where the outcomes go."""
    group = parser.getgroup("slipstream")
    group.addoption("--slipstream-python")
    group.addoption("--slipstream-source")
    group.addoption("--slipstream-out", type=Path)


def pytest_configure(config: Any) -> None:
    """Replace the launcher."""
    sys.path.append(str(config.rootpath))  # after the installed vLLM: the checkout lacks the compiled half
    vllm.distributed.cleanup_dist_env_and_memory = lambda *_: None  # it empties a device's cache after each test
    from tests.utils import RemoteOpenAIServer, RemoteVLLMServer

    out: Path = config.getoption("--slipstream-out")
    launcher = launcher_for(
        config.getoption("--slipstream-python"), config.getoption("--slipstream-source"), out.with_suffix(".log")
    )
    _replace(RemoteVLLMServer, launcher)
    for kind in (RemoteVLLMServer, *RemoteVLLMServer.__subclasses__()):
        kind._start_server = kind._poll = kind._terminate_process_tree = None  # nothing of theirs may run
    assert issubclass(RemoteOpenAIServer, RemoteVLLMServer)
    config.pluginmanager.register(Recorder(out, {"vllm": vllm.__version__, "dropped_flags": launcher.dropped}))
    config.add_cleanup(launcher.stop)


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """Keep the tests that talk to a server."""
    kept = [item for item in items if _talks_to_a_server(item)]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept


def _talks_to_a_server(item: Any) -> bool:
    if any("RemoteOpenAIServer" in inspect.getsource(f) for f in (item.function,)):
        return True
    for name in item.fixturenames:
        for definition in item._fixtureinfo.name2fixturedefs.get(name, ()):
            if "RemoteOpenAIServer(" in inspect.getsource(definition.func):
                return True
    return False


def _replace(base: Any, launcher: Launcher) -> None:
    def start(
        self: Any,
        model: str,
        vllm_serve_args: list[str],
        *,
        env_dict: Any = None,
        seed: Any = 0,
        auto_port: bool = True,
        max_wait_seconds: Any = None,
        override_hf_configs: Any = None,
    ) -> None:
        self.uds = None
        self.show_hidden_metrics = False
        key = (env_dict or {}).get("VLLM_API_KEY")  # their flag by another way
        flags = [*vllm_serve_args, *(["--api-key", key] if key else [])]
        self.host, self.port = launcher.address(model, flags)

    base.__init__ = start
    base._shutdown = lambda self: None
