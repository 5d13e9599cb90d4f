"""Chat transcripts as JSON lines, before any tokenizer.

A line holds `task_id`, `trial` (0 if absent), optional `reward`, and `messages` in OpenAI style, or `pool` (messages)
with `turns` ([{"prompt": [index, ...], "completion": index}]): the exact prompt of every turn. Other keys are ignored.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_dta.data.fields import is_number, show
from megatron_dta.errors import UsageError

Message = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Transcript:
    """One conversation; `turns` holds (prompt messages, completion message) of every assistant turn."""

    where: str
    group_id: str
    trajectory_id: str
    reward: float | None
    messages: list[Message] | None
    """None when only the turns are known: histories may have been edited."""
    turns: list[tuple[list[Message], Message]]


def read_transcripts(path: Path) -> list[Transcript]:
    """Read chat transcripts, one JSON object a line. Raises UsageError, naming the line and the field."""
    try:
        # not splitlines: text may hold U+2028 and the like
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: not readable ({error}), expected JSON lines in UTF-8") from error
    transcripts: dict[str, Transcript] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        transcript = _transcript(f"{path}, line {number}", line)
        if transcript.trajectory_id in transcripts:
            raise UsageError(f"{transcript.where}: a duplicate, expected each task_id and trial once")
        transcripts[transcript.trajectory_id] = transcript
    if not transcripts:
        raise UsageError(f"{path}: got an empty file, expected one transcript a line")
    return list(transcripts.values())


def _transcript(where: str, line: str) -> Transcript:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise UsageError(f"{where}: not valid JSON ({error})") from error
    if not isinstance(record, dict) or not isinstance(record.get("task_id"), str | int):
        raise UsageError(f"{where}: expected an object with task_id, trial, and messages or pool and turns")
    group_id, reward = str(record["task_id"]), record.get("reward")
    trajectory_id = f"{group_id}/{record.get('trial', 0)}"
    where = f"{where}, sample {show(trajectory_id)}"
    if reward is not None and not is_number(reward):
        raise UsageError(f"{where}: reward: got {show(reward)}, expected a finite number")
    if record.get("turns") is not None:
        messages, turns = None, _exact_turns(where, record)
    else:
        messages = _messages(where, "messages", record)
        turns = [(messages[:k], message) for k, message in enumerate(messages) if message["role"] == "assistant"]
    return Transcript(
        where=where,
        group_id=group_id,
        trajectory_id=trajectory_id,
        reward=None if reward is None else float(reward),
        messages=messages,
        turns=turns,
    )


def _messages(where: str, name: str, record: Message) -> list[Message]:
    """Return checked messages; content null is the empty string, which is what templates can render."""
    messages = record.get(name)
    if not isinstance(messages, list) or not messages:
        raise UsageError(f"{where}: {name}: got {show(messages)}, expected a list of messages")
    for k, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise UsageError(f"{where}: {name}[{k}]: got {show(message)}, expected an object with role and content")
        if not _are_calls(message.get("tool_calls") or []):
            raise UsageError(f"{where}: {name}[{k}]: tool_calls: got {show(message['tool_calls'])}, expected functions")
    return [message | {"content": ""} if message.get("content") is None else message for message in messages]


def _are_calls(calls: Any) -> bool:
    """Tell whether these are tool calls: {"function": {...}}, or the function itself."""
    return isinstance(calls, list) and all(
        isinstance(call, dict) and isinstance(call.get("function", call), dict) for call in calls
    )


def _exact_turns(where: str, record: Message) -> list[tuple[list[Message], Message]]:
    pool, turns = _messages(where, "pool", record), []
    if not isinstance(record["turns"], list):
        raise UsageError(f"{where}: turns: got {show(record['turns'])}, expected a list")
    for k, turn in enumerate(record["turns"]):
        try:
            indices = [*turn["prompt"], turn["completion"]]
            if not all(type(i) is int and 0 <= i < len(pool) for i in indices):
                raise IndexError
        except (KeyError, TypeError, IndexError) as error:
            expected = f"prompt (a list) and completion: indices from 0 to {len(pool) - 1} of pool"
            raise UsageError(f"{where}: turns[{k}]: got {show(turn)}, expected {expected}") from error
        *prompt, completion = (pool[i] for i in indices)
        if completion["role"] != "assistant":
            raise UsageError(f"{where}: turns[{k}]: completion has role {show(completion['role'])}, expected assistant")
        turns.append((prompt, completion))
    return turns
