"""Turn chat transcripts into rollout files: ids of a tokenizer and its chat template, loss on assistant turns.

    python tools/tokenize_rollouts.py IN --tokenizer DIR [--tools JSON] [--history append|rerender] --out OUT

IN is described in megatron_dta/data/transcripts.py.
"""

import argparse
import gzip
import json
import shutil
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from jinja2 import TemplateError
from rich.console import Console
from rich.progress import track

from megatron_dta.data.fields import show
from megatron_dta.data.rollouts import write_jsonl, write_npz
from megatron_dta.data.samples import Sample
from megatron_dta.data.transcripts import Message, Transcript, read_transcripts
from megatron_dta.errors import UsageError

Notes = dict[str, list[str]]
"""Places by what is worth a warning there."""

WRITERS = {".npz": write_npz, ".jsonl": write_jsonl}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return 0, or 2 after one line about what is wrong with the input."""
    try:
        _run(_parse_arguments(argv))
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tokenize_rollouts.py", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("transcripts", type=Path, metavar="IN", help="chat transcripts, .jsonl")
    parser.add_argument(
        "--tokenizer", type=Path, required=True, metavar="DIR", help="folder of a Hugging Face tokenizer"
    )
    parser.add_argument("--tools", type=Path, metavar="JSON", help="list of tool schemas for the chat template")
    parser.add_argument(
        "--history",
        choices=("append", "rerender"),
        default="append",
        help="append: one sample a conversation, rendered once (default); rerender: one sample an assistant turn, with "
        "the history as the template renders it at that turn; lines with `turns` are always one sample a turn",
    )
    parser.add_argument(
        "--template-arguments", type=json.loads, default={}, metavar="JSON", help="more template variables"
    )
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N transcripts")
    parser.add_argument("--out", type=Path, required=True, metavar="OUT", help="rollout file to write: .npz or .jsonl")
    return parser.parse_args(argv)


def _run(arguments: argparse.Namespace) -> None:
    out = arguments.out
    if out.suffix not in WRITERS or not out.parent.is_dir():
        raise UsageError(f"--out {out}: expected a .npz or .jsonl file in an existing folder")
    if arguments.limit is not None and arguments.limit < 1:
        raise UsageError(f"--limit is {arguments.limit}; expected a positive integer")
    tools = _read_json(arguments.tools) if arguments.tools else None
    if not isinstance(tools, list | None):
        raise UsageError(f"--tools {arguments.tools}: got {show(tools)}, expected a list of tool schemas")
    if not isinstance(arguments.template_arguments, dict):
        raise UsageError("--template-arguments: expected a JSON object")
    transcripts = read_transcripts(arguments.transcripts)[: arguments.limit]
    chat = load_chat_tokenizer(arguments.tokenizer, tools, arguments.template_arguments)
    samples: list[Sample] = []
    notes: Notes = defaultdict(list)
    console = Console(stderr=True)
    for transcript in track(
        transcripts, "tokenizing", console=console, transient=True, disable=not console.is_terminal
    ):
        samples += tokenize(chat, transcript, arguments.history, notes)
    if not samples:
        raise UsageError(f"{arguments.transcripts}: got no assistant turn, expected at least one")
    WRITERS[out.suffix](out, samples)
    for what, places in notes.items():
        print(f"warning: {len(places)} {what} (first: {places[0]})", file=sys.stderr)
    num_tokens = sum(len(sample.tokens) for sample in samples)
    num_trained = sum(int(sample.loss_mask.sum()) for sample in samples)
    print(f"{out}: {len(samples)} samples, {num_tokens} tokens, {num_trained} trained")


@dataclass(frozen=True, kw_only=True)
class ChatTokenizer:
    """A tokenizer and its chat template, with what the template was found to need."""

    tokenizer: Any
    template: Callable[..., str]
    stop_ids: np.ndarray
    """Special tokens that end an assistant turn."""
    argument_forms: frozenset[type]
    """Types of tool-call arguments that the template renders: str (JSON), dict."""

    def render(self, where: str, messages: list[Message], *, prompt: bool = False) -> str:
        """Render messages to text; a prompt ends where the assistant is to write. Raises UsageError."""
        return self.template(where, [self._with_arguments(where, message) for message in messages], prompt=prompt)

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """Return int32 ids of each text; nothing is added, cut or padded."""
        batch = self.tokenizer.backend_tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, np.int32) for encoding in batch]

    def _with_arguments(self, where: str, message: Message) -> Message:
        """Return a message with tool-call arguments in a form that the template renders."""
        if not message.get("tool_calls"):
            return message
        if not self.argument_forms:
            raise UsageError(f"{where}: the chat template does not render tool_calls, which this conversation has")
        calls = []
        for call in message["tool_calls"]:
            function = call.get("function", call)
            function = function | {"arguments": self._arguments(where, function.get("arguments"))}
            calls.append(call | {"function": function} if "function" in call else function)
        return message | {"tool_calls": calls}

    def _arguments(self, where: str, arguments: Any) -> Any:
        """Return an object where the template renders one, as inference servers do, else a JSON string."""
        try:
            parsed = json.loads(arguments or "{}") if isinstance(arguments, str | None) else arguments
        except ValueError:
            parsed = None
        if isinstance(parsed, dict):
            return parsed if dict in self.argument_forms else json.dumps(parsed, ensure_ascii=False)
        # a malformed call is still what the model wrote
        if isinstance(arguments, str) and str in self.argument_forms:
            return arguments
        raise UsageError(f"{where}: tool-call arguments: got {show(arguments)}, expected a JSON object (in a string)")


def load_chat_tokenizer(folder: Path, tools: list | None, template_arguments: dict[str, Any]) -> ChatTokenizer:
    """Load a folder with tokenizer.json (or tokenizer.json.gz) and a chat template. Raises UsageError."""
    tokenizer = _load_tokenizer(folder)

    def template(where: str, messages: list[Message], *, prompt: bool = False) -> str:
        options = template_arguments | {"tools": tools, "add_generation_prompt": prompt, "tokenize": False}
        try:
            return str(tokenizer.apply_chat_template(messages, **options))
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise UsageError(f"{where}: the chat template fails: {' '.join(str(error).split())}") from error

    from_text, from_object = (_probe_call(template, arguments) for arguments in ('{"probe": 1}', {"probe": 1}))
    # neither a quoted string of JSON nor Python's way to show an object is what a model is to write
    takes_text, takes_object = '{"probe": 1}' in from_text, "probe" in from_object and "'probe'" not in from_object
    return ChatTokenizer(
        tokenizer=tokenizer,
        template=template,
        stop_ids=_probe_stop_ids(folder, tokenizer, (_probe(template, content="answer"), from_text, from_object)),
        argument_forms=frozenset([str] * takes_text + [dict] * takes_object),
    )


def _load_tokenizer(folder: Path) -> Any:
    # imported here, so that --help and faults of the transcripts do not wait for it
    from transformers import AutoTokenizer

    with _unpacked(folder) as source:
        try:
            tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=True, trust_remote_code=False)
        except (OSError, ValueError, KeyError) as error:
            raise UsageError(f"{folder}: not a tokenizer folder ({' '.join(str(error).split())[:200]})") from error
    if not tokenizer.is_fast or not tokenizer.chat_template:
        raise UsageError(f"{folder}: expected tokenizer.json and a chat template")
    # tokenizer.json may ask for both, and would get them without a word
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    return tokenizer


@contextmanager
def _unpacked(folder: Path) -> Iterator[Path]:
    """Yield a folder with tokenizer.json: the given one, or a temporary copy in which it is unpacked."""
    packed = folder / "tokenizer.json.gz"
    if (folder / "tokenizer.json").exists() or not packed.exists():
        yield folder
        return
    with TemporaryDirectory() as copy:
        for pattern in ("*.json", "*.jinja", "*.txt", "*.model"):
            for file in folder.glob(pattern):
                shutil.copyfile(file, Path(copy, file.name))
        with gzip.open(packed) as source, open(Path(copy, "tokenizer.json"), "wb") as target:
            shutil.copyfileobj(source, target)
        yield Path(copy)


def _probe(render: Callable[..., str], **completion: Any) -> str:
    """Render a question and a completion; return the text of the completion."""
    messages = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "", **completion}]
    return render("a plain question", messages).removeprefix(render("a plain question", messages[:1], prompt=True))


def _probe_call(render: Callable[..., str], arguments: Any) -> str:
    """Return the text of a tool call, empty where the template refuses it."""
    function = {"name": "call", "arguments": arguments}
    try:
        return _probe(render, tool_calls=[{"id": "call00000", "type": "function", "function": function}])
    except UsageError:
        return ""


def _probe_stop_ids(folder: Path, tokenizer: Any, texts: Iterable[str]) -> np.ndarray:
    """Find the special tokens with which completions end."""
    special, stops = set(tokenizer.all_special_ids), set()
    for text in texts:
        ids = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
        stops.update([token for token in ids if token in special][-1:])
    if not stops:
        raise UsageError(f"{folder}: the chat template ends assistant turns without a special token, expected one")
    return np.array(sorted(stops), np.int32)


BRANCH = "turns do not extend the turn before them: they branch"
APART = "completions do not start at a token border: prompt and completion are tokenized apart"
RESHOWN = "turns are shown otherwise once they are history, and trained as shown: --history rerender keeps them"
UNTRAINED = "conversations have no assistant turn: nothing is trained"


def tokenize(chat: ChatTokenizer, transcript: Transcript, history: str, notes: Notes) -> list[Sample]:
    """Return the samples of one conversation: one for history "append", one a turn for "rerender" and exact turns."""
    if not transcript.turns:
        notes[UNTRAINED].append(transcript.where)
    if transcript.messages is not None and history == "append":
        return [_append_only(chat, transcript, transcript.messages, notes)]
    return _per_turn(chat, transcript, notes)


def _append_only(chat: ChatTokenizer, transcript: Transcript, messages: list[Message], notes: Notes) -> Sample:
    """Render the conversation once; tokens after its last assistant turn train nothing and are left out.

    Raises UsageError for a turn whose prompt, as the template renders it then, is not a token prefix of the whole.
    """
    whole = chat.render(transcript.where, messages)
    prompt_texts = [chat.render(transcript.where, prompt, prompt=True) for prompt, _ in transcript.turns]
    ids, *prompts = chat.encode([whole, *prompt_texts])
    loss_mask = np.zeros(len(ids), bool)
    end = len(ids)
    for turn, prompt in enumerate(prompts):
        place = f"{transcript.where}, turn {turn}"
        difference = _difference(prompt, ids)
        if difference:
            fault = f"its prompt is not a token prefix of the conversation: {difference}"
            raise UsageError(f"{place}: {fault}; the template rewrites history: use --history rerender")
        history, completion = transcript.turns[turn]
        if not whole.startswith(chat.render(place, [*history, completion])):
            notes[RESHOWN].append(place)
        end = _end_of_turn(chat, place, ids, len(prompt))
        loss_mask[len(prompt) : end] = True
    return _sample(transcript, transcript.trajectory_id, ids[:end], loss_mask[:end])


def _per_turn(chat: ChatTokenizer, transcript: Transcript, notes: Notes) -> list[Sample]:
    """Render prompt, and prompt with completion, of every turn: what an inference server would be sent and return."""
    prompt_texts = [chat.render(transcript.where, prompt, prompt=True) for prompt, _ in transcript.turns]
    whole_texts = [chat.render(transcript.where, [*prompt, last]) for prompt, last in transcript.turns]
    encoded = chat.encode(prompt_texts + whole_texts)
    samples: list[Sample] = []
    for turn, (prompt, ids) in enumerate(zip(encoded, encoded[len(prompt_texts) :])):
        place = f"{transcript.where}, turn {turn}"
        if _difference(prompt, ids):
            if not whole_texts[turn].startswith(prompt_texts[turn]):
                raise UsageError(f"{place}: the template renders its prompt otherwise once the completion follows")
            # sampled ids follow the prompt's own, whatever the tokenizer would merge across the border
            completion = chat.encode([whole_texts[turn].removeprefix(prompt_texts[turn])])[0]
            ids = np.concatenate([prompt, completion])
            notes[APART].append(place)
        difference = _difference(samples[-1].tokens, prompt) if samples else None
        if difference:
            notes[BRANCH].append(f"{place}: {difference}")
        end = _end_of_turn(chat, place, ids, len(prompt))
        sample_id = f"{transcript.trajectory_id}#turn{turn}"
        samples.append(_sample(transcript, sample_id, ids[:end], np.arange(end) >= len(prompt)))
    return samples


def _end_of_turn(chat: ChatTokenizer, place: str, ids: np.ndarray, start: int) -> int:
    """Return one past the first stop token from `start` on: what the model sampled last."""
    stops = np.flatnonzero(np.isin(ids[start:], chat.stop_ids))
    if not len(stops):
        raise UsageError(f"{place}: the template ends it without a stop token ({chat.stop_ids.tolist()})")
    return start + int(stops[0]) + 1


def _difference(prefix: np.ndarray, ids: np.ndarray) -> str | None:
    """Say where `ids` do not start with `prefix`, or None."""
    length = min(len(prefix), len(ids))
    differs = np.flatnonzero(prefix[:length] != ids[:length])
    if len(differs):
        at = int(differs[0])
        return f"token {at} is {prefix[at]}, then {ids[at]}"
    return f"it has {len(prefix)} tokens, then {len(ids)}" if len(ids) < len(prefix) else None


def _sample(transcript: Transcript, sample_id: str, tokens: np.ndarray, loss_mask: np.ndarray) -> Sample:
    return Sample(
        sample_id=sample_id,
        group_id=transcript.group_id,
        trajectory_id=transcript.trajectory_id,
        tokens=tokens,
        loss_mask=loss_mask,
        reward=transcript.reward,
    )


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: not readable JSON ({error})") from error


if __name__ == "__main__":
    sys.exit(main())
