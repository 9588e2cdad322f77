"""Turn what a user names (a folder, a .gguf file, a hub id, "embedded") into a path on this machine."""

import logging
import re
from pathlib import Path

from slipstream.checkpoint.embedded import Progress, embedded_model
from slipstream.checkpoint.files import read_json
from slipstream.errors import CheckpointError

log = logging.getLogger(__name__)

EMBEDDED = "embedded"
_EMBEDDED_NAMES = (EMBEDDED, "auto")
_HUB_ID = re.compile(r"[\w][\w.-]*(/[\w][\w.-]*)?")
_BESIDE = ["*.json", "*.jinja", "tokenizer.model", "tiktoken.model"]
_PATTERNS = [*_BESIDE, "*.safetensors"]
_PICKLE_PATTERNS = [*_BESIDE, "pytorch_model*.bin"]


def resolve(path_or_id: str | Path | None, progress: Progress | None = None) -> Path:
    """Return the local folder (or .gguf file) behind a path or a hub id.

    None, "embedded" and "auto" mean the embedded model (`progress` hears of its making). A path that exists wins. A hub
    id is looked up in the Hugging Face cache first, and fetched only when it is not there.
    """
    if path_or_id is None or is_embedded(path_or_id):
        return embedded_model(progress)
    if path_or_id == "":
        raise CheckpointError("The model's name is empty; it is a folder, a .gguf file, a hub id, or 'embedded'.")
    path = Path(path_or_id).expanduser()
    if path.is_dir():
        return path
    if path.is_file():
        if path.suffix == ".gguf":
            return path
        raise CheckpointError(f"{path}: is a file. Name the checkpoint's folder, or a .gguf file.")
    if isinstance(path_or_id, Path) or not _HUB_ID.fullmatch(path_or_id):
        raise CheckpointError(f"{path_or_id}: there is no such folder or .gguf file.")
    return _from_hub(path_or_id)


def is_embedded(name: str | Path) -> bool:
    """Tell whether a model's name means the embedded one."""
    return str(name) in _EMBEDDED_NAMES


def _from_hub(repo_id: str) -> Path:
    from huggingface_hub import snapshot_download  # a quarter of a second, and only hub ids need it
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(repo_id, local_files_only=True))
        if _is_complete(folder) and not _lacks_its_tokenizer(folder):
            return folder
    except LocalEntryNotFoundError:
        log.info("%s is not in the Hugging Face cache; asking the hub", repo_id)
    except HFValidationError as error:
        raise CheckpointError(f"{repo_id}: is neither a folder here nor a hub id ({error}).") from error
    try:
        folder = Path(snapshot_download(repo_id, allow_patterns=_PATTERNS))
        if not any(folder.glob("*.safetensors")):
            folder = Path(snapshot_download(repo_id, allow_patterns=_PICKLE_PATTERNS))
    except HfHubHTTPError as error:
        raise CheckpointError(
            f"{repo_id}: the Hugging Face hub answers {error.response.status_code}. Check the name; for a gated or "
            f"private repository accept its terms and run `hf auth login`; or name a local folder."
        ) from error
    except (LocalEntryNotFoundError, OSError) as error:
        raise CheckpointError(
            f"{repo_id}: there is no such folder, it is not in the Hugging Face cache, and the hub cannot be "
            f"reached. Go online once (`hf download {repo_id}`), or name a local folder or .gguf file."
        ) from error
    if not _is_complete(folder):
        # Without network, huggingface_hub hands out a broken-off download as if it were whole.
        raise CheckpointError(
            f"{repo_id}: what is in the Hugging Face cache lacks its config or weights, and no more could be fetched. "
            f"Go online once (`hf download {repo_id}`); if that changes nothing, it is not a model repository."
        )
    return folder


def _lacks_its_tokenizer(folder: Path) -> bool:
    """Whether this is a Kimi without tiktoken.model, which other tools (and this one, once) leave unfetched."""
    names = read_json(folder / "config.json").get("architectures") or []
    kimi = any("Kimi" in str(name) for name in names if isinstance(names, list))
    return kimi and not any((folder / name).is_file() for name in ("tiktoken.model", "tokenizer.json"))


def _is_complete(folder: Path) -> bool:
    """Whether a cached snapshot has config and all weights; a tokenizer-only or broken-off download does not count."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        named = {str(name) for name in weight_map.values()} if isinstance(weight_map, dict) else {""}
        return (folder / "config.json").is_file() and all((folder / name).is_file() for name in named)
    weights = [*folder.glob("*.safetensors"), *folder.glob("pytorch_model*.bin")]
    return (folder / "config.json").is_file() and bool(weights)
