import shutil

from slipstream.checkpoint.embedded import embedded_draft
from slipstream.cli import peers


def test_another_draft_is_written_anew_for_vllm(tmp_path, monkeypatch):
    shipped = tmp_path / "shipped"
    shutil.copytree(embedded_draft(), shipped)
    monkeypatch.setattr(peers, "environments_dir", lambda: tmp_path / "environments")
    monkeypatch.setattr(peers, "embedded_draft", lambda: shipped)
    first = peers.draft_for_vllm()
    assert peers.draft_for_vllm() == first and list(first.glob("*.safetensors"))
    weights = next(shipped.glob("*.safetensors"))
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert peers.draft_for_vllm() != first
