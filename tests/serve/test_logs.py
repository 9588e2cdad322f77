"""What clients send stays within its record of the log, in both forms."""

import io
import json
import logging

import pytest
from tiny_server import Running

from slipstream.serve.logs import set_up_logs

FORGED = "\n12:00:00 INFO    all is well\r\x1b[2J\x9b2J\x7f\u2028\u202e\ud800"
STEERING = set(FORGED) - set(" 12:00INFO    all is well[J") - {"\n"}


def log_to(as_json: bool) -> io.StringIO:
    """Send every record to a stream of its own, until the test ends."""
    stream = io.StringIO()
    set_up_logs("debug", as_json, stream)
    return stream


@pytest.mark.parametrize("as_json", [True, False])
def test_a_path_a_method_and_a_header_cannot_write_lines_of_their_own(server: Running, as_json):
    stream = log_to(as_json)
    with server.client() as client:
        path = "/v1/models/x%0a12:00:00%20INFO%20%20%20%20all%20is%20well%0d%1b%5b2J%c2%9b%e2%80%a8%20status=200"
        assert client.get(path).status_code == 404
        assert client.request("FORGE", "/version", headers={"X-Request-ID": "a%0ab"}).status_code == 405
    text = stream.getvalue()
    assert "all is well" in text
    assert not STEERING & set(text)
    for line in text.splitlines():
        assert not line.startswith("12:00:00")
        if as_json:
            assert json.loads(line)["message"]
    assert as_json or '\\u2028 status=200" status=404' in text  # within the quotes of its own field


@pytest.mark.parametrize("as_json", [True, False])
def test_neither_can_a_message_a_field_or_an_exception(as_json):
    stream = log_to(as_json)
    logger = logging.getLogger("slipstream.serve.tests")
    try:
        raise ValueError(FORGED)
    except ValueError:
        logger.exception("it said %s", FORGED, extra={"fields": {"answers": [FORGED], "path": FORGED}})
    text = stream.getvalue()
    assert not STEERING & set(text)
    first, *rest = text.removesuffix("\n").split("\n")
    if as_json:
        assert rest == []
        record = json.loads(first)
        assert FORGED in record["message"]  # nothing is lost to a machine
        assert record["path"] == FORGED
    else:
        assert all(line.startswith("    ") for line in rest)
