"""The `llm` command: prompts, conversations, schemas and tools."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from report import MODEL, PROMPT, URL, Forecast, run_all

home = Path(tempfile.mkdtemp())
(home / "extra-openai-models.yaml").write_text(
    f"- model_id: ours\n  model_name: {MODEL}\n  api_base: {URL}/v1\n  api_key_name: none\n"
    "  supports_schema: true\n  supports_tools: true\n"
    f"- model_id: ours-text\n  model_name: {MODEL}\n  api_base: {URL}/v1\n  completion: true\n"
)
LIMITS = ("-o", "max_tokens", "60", "-o", "temperature", "0")
FUNCTION = """
def weather(city: str) -> str:
    "Tell the weather of a city."
    return "It will be warm in " + city
"""


def llm(*arguments: str) -> str:
    env = {**os.environ, "LLM_USER_PATH": str(home), "OPENAI_API_KEY": "none"}
    command = [sys.executable, "-m", "llm", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, env=env)
    assert done.returncode == 0, done.stderr[-1000:]
    return done.stdout


def prompt():
    assert llm("-m", "ours", *LIMITS, PROMPT).strip()


def prompt_without_stream():
    assert llm("-m", "ours", "--no-stream", *LIMITS, "-s", "Be brief.", PROMPT).strip()


def completion():
    assert llm("-m", "ours-text", *LIMITS, "One, two,").strip()


def conversation():
    assert llm("-m", "ours", *LIMITS, PROMPT).strip()
    assert llm("-c", *LIMITS, "And in Rome?").strip()


def schema():
    Forecast.model_validate_json(
        llm("-m", "ours", *LIMITS, "--schema", json.dumps(Forecast.model_json_schema()), PROMPT)
    )


def tools_offered():
    assert llm("-m", "ours", *LIMITS, "--functions", FUNCTION, "--no-stream", PROMPT) is not None


run_all([prompt, prompt_without_stream, completion, conversation, schema, tools_offered])
