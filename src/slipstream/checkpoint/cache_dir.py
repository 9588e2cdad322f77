"""Where slipstream keeps what it makes once: the user's cache folder, by the platform's own convention."""

import os
import sys
from pathlib import Path


def default_cache_dir() -> Path:
    """Return the user's cache folder for slipstream (not created).

    The one place where the environment is read: on Linux the XDG convention *is* an environment variable, and a user
    who set it expects to be obeyed. Everything that uses the cache also takes an explicit folder.
    """
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "slipstream"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local")) / "slipstream" / "Cache"
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (named if named.is_absolute() else Path.home() / ".cache") / "slipstream"
