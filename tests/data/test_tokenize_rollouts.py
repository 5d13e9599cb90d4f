import gzip
import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from megatron_dta.data.rollouts import read_rollouts
from megatron_dta.errors import UsageError

TOOL = Path(__file__).parents[2] / "tools" / "tokenize_rollouts.py"
SPECIAL = ["<|im_start|>", "<|im_end|>", "<think>"]

MESSAGE = "{{ '<|im_start|>' + m.role + '\n' + m.content }}"
OBJECT_CALLS = "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
TEXT_CALLS = "{% for c in m.tool_calls or [] %}{{ c.function.name + c.function.arguments }}{% endfor %}"
BOTH_CALLS = (
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{% if c.function.arguments is string %}"
    "{{ c.function.arguments }}{% else %}{{ c.function.arguments | tojson }}{% endif %}{% endfor %}"
)
PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{{ think or '' }}{% endif %}"


def template(message=MESSAGE, calls=BOTH_CALLS):
    return "{% for m in messages %}" + message + calls + "{{ '<|im_end|>\n' }}{% endfor %}" + PROMPT


FORGETFUL = template("{{ '<|im_start|>' + m.role + '\n' + (m.content if loop.last else m.content.split('|')[-1]) }}")
"""Shows of an earlier message only what follows its last bar."""

COUNTING = "{{ messages | length }}" + template()
"""Begins with what no later prompt repeats."""

ANSWER = {"role": "assistant", "content": "ab"}
CHAT = [
    {"role": "user", "content": "1+1"},
    ANSWER,
    {"role": "user", "content": "ok"},
    {"role": "assistant", "content": "c"},
]


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("tokenize_rollouts", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def tokenizer_folder(tmp_path):
    """Return a maker of tokenizer folders: one token a byte, two newlines one token, three special tokens."""

    def make(chat_template=None, packed=False):
        vocab = {symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
        tokenizer = Tokenizer(models.BPE(vocab | {"ĊĊ": 256}, [("Ċ", "Ċ")]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens(SPECIAL)
        # what a stored tokenizer may ask for, and the tool must not do
        tokenizer.enable_truncation(4)
        tokenizer.enable_padding(length=64)
        folder = tmp_path / "tokenizer"
        folder.mkdir()
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": chat_template or template()}
        config["eos_token"] = "<|im_end|>"
        config["additional_special_tokens"] = [SPECIAL[0]]
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        if packed:
            with gzip.open(folder / "tokenizer.json.gz", "wt") as file:
                file.write(tokenizer.to_str())
        else:
            tokenizer.save(str(folder / "tokenizer.json"))
        return folder

    return make


@pytest.fixture
def run(tool, tmp_path, capsys):
    """Return a runner of the tool on transcripts: exit code, samples, standard error, text of ids."""

    def go(folder, *records, options=(), ending="jsonl"):
        source, out = tmp_path / "chats.jsonl", tmp_path / f"out.{ending}"
        lines = [json.dumps({"task_id": "t", "trial": i} | record) for i, record in enumerate(records)]
        source.write_text("\n".join(lines), encoding="utf-8")
        code = tool.main([str(source), "--tokenizer", str(folder), "--out", str(out), *options])
        return code, read_rollouts(out) if out.exists() else [], capsys.readouterr().err

    return go


@pytest.fixture
def text():
    """Return the reader of ids: everything, or what is trained."""

    def decode(folder, sample, trained=False):
        file = folder / "tokenizer.json"
        content = (
            file.read_text() if file.exists() else gzip.decompress(file.with_suffix(".json.gz").read_bytes()).decode()
        )
        ids = sample.tokens[sample.loss_mask] if trained else sample.tokens
        return Tokenizer.from_str(content).decode(ids.tolist(), skip_special_tokens=False)

    return decode


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("ending", ["jsonl", "npz"])
def test_append_renders_once_and_trains_assistant_turns(run, text, tokenizer_folder, packed, ending):
    folder = tokenizer_folder(packed=packed)
    code, (sample,), err = run(folder, {"messages": [*CHAT, CHAT[0]], "reward": 2}, ending=ending)
    assert (code, err) == (0, "")
    assert (sample.group_id, sample.sample_id, sample.trajectory_id, sample.reward) == ("t", "t/0", "t/0", 2.0)
    turns = ["user\n1+1", "assistant\nab", "user\nok", "assistant\nc"]
    assert text(folder, sample) == "\n".join(f"<|im_start|>{turn}<|im_end|>" for turn in turns)
    assert text(folder, sample, trained=True) == "ab<|im_end|>c<|im_end|>"


def test_a20_rerendered_turns_of_an_appending_template_extend_each_other(run, tokenizer_folder):
    folder = tokenizer_folder()
    code, (first, second), err = run(folder, {"messages": CHAT}, options=["--history", "rerender"])
    assert (code, err) == (0, "")
    assert [first.sample_id, second.sample_id] == ["t/0#turn0", "t/0#turn1"]
    assert first.trajectory_id == second.trajectory_id == "t/0"
    np.testing.assert_array_equal(second.tokens[: len(first.tokens)], first.tokens)
    assert [int(first.loss_mask.sum()), int(second.loss_mask.sum())] == [3, 2]
    assert second.loss_mask[-2:].all()


REWRITTEN = [CHAT[0], {"role": "assistant", "content": "why|ab"}, *CHAT[2:]]


def test_a14_rewritten_history_branches_with_a_count(run, text, tokenizer_folder):
    folder = tokenizer_folder(FORGETFUL)
    code, samples, err = run(folder, {"messages": REWRITTEN}, {"messages": CHAT}, options=["--history", "rerender"])
    assert code == 0
    assert [text(folder, sample, trained=True) for sample in samples[:2]] == ["why|ab<|im_end|>", "c<|im_end|>"]
    assert "\nab<|im_end|>" in text(folder, samples[1])
    assert "1 turns do not extend the turn before them" in err
    assert "sample 't/0', turn 1: token" in err


def test_a14_appending_tells_of_turns_that_history_shows_otherwise(run, text, tokenizer_folder):
    folder = tokenizer_folder(FORGETFUL)
    code, (sample,), err = run(folder, {"messages": REWRITTEN})
    assert code == 0
    assert text(folder, sample, trained=True) == "ab<|im_end|>c<|im_end|>"
    assert "1 turns are shown otherwise once they are history" in err


def test_a15_prompt_that_is_no_prefix_is_refused_when_appending(run, tokenizer_folder):
    """The error names sample, turn, index and both ids."""
    code, samples, err = run(tokenizer_folder(COUNTING), {"messages": CHAT[:1]}, {"messages": CHAT})
    assert (code, samples) == (2, [])
    assert "sample 't/1', turn 0: its prompt is not a token prefix of the conversation: token 0 is 16, then 19" in err
    assert err.count("\n") == 1


def test_a13_completion_that_merges_with_its_prompt_keeps_the_prompts_ids(run, text, tokenizer_folder):
    """The prompt ends in one newline token; with the completion behind it the tokenizer would join two."""
    folder = tokenizer_folder()
    chat = [CHAT[0], {"role": "assistant", "content": "\n\nx"}]
    code, (sample,), err = run(folder, {"messages": chat}, options=["--history", "rerender"])
    assert code == 0
    assert text(folder, sample, trained=True) == "\n\nx<|im_end|>"
    assert 256 not in sample.tokens
    assert "1 completions do not start at a token border" in err


def test_a13_merging_completion_is_refused_when_appending(run, tokenizer_folder):
    code, _, err = run(tokenizer_folder(), {"messages": [CHAT[0], {"role": "assistant", "content": "\n\nx"}]})
    assert code == 2
    assert "turn 0: its prompt is not a token prefix" in err


def test_exact_turns_are_one_sample_each_whatever_the_history(run, text, tokenizer_folder):
    folder = tokenizer_folder()
    turns = [{"prompt": [0], "completion": 1}, {"prompt": [2, 0], "completion": 3}]
    code, samples, err = run(folder, {"pool": CHAT, "turns": turns, "messages": None, "reward": None})
    assert code == 0
    assert [text(folder, sample, trained=True) for sample in samples] == ["ab<|im_end|>", "c<|im_end|>"]
    assert text(folder, samples[1]).startswith("<|im_start|>user\nok<|im_end|>\n<|im_start|>user\n1+1")
    assert [sample.reward for sample in samples] == [None, None]
    assert "1 turns do not extend" in err


def test_template_arguments_and_tools_reach_the_template(run, text, tokenizer_folder, tmp_path):
    folder = tokenizer_folder("{{ tools[0].name }}" + template())
    tools = tmp_path / "tools.json"
    tools.write_text('[{"name": "search"}]')
    options = ["--tools", str(tools), "--history", "rerender", "--template-arguments", '{"think": "<think>"}']
    chat = [CHAT[0], {"role": "assistant", "content": "<think>y"}]
    code, (sample,), _ = run(folder, {"messages": chat}, options=options)
    assert code == 0
    assert text(folder, sample).startswith("search<|im_start|>")
    assert text(folder, sample, trained=True) == "y<|im_end|>"


@pytest.mark.parametrize(
    ("calls", "arguments", "shown"),
    [
        (BOTH_CALLS, '{"a":1}', 'f{"a": 1}'),
        (BOTH_CALLS, {"a": "é"}, 'f{"a": "é"}'),
        (BOTH_CALLS, '{"a":', 'f{"a":'),
        (BOTH_CALLS, "", "f{}"),
        (OBJECT_CALLS, '{"a":1}', 'f{"a": 1}'),
        (TEXT_CALLS, '{"a":1}', 'f{"a": 1}'),
        (TEXT_CALLS, {"a": 1}, 'f{"a": 1}'),
        (TEXT_CALLS, "oops", "foops"),
    ],
)
def test_tool_call_arguments_take_the_form_that_the_template_renders(
    run, text, tokenizer_folder, calls, arguments, shown
):
    folder = tokenizer_folder(template(calls=calls))
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    code, (sample,), err = run(
        folder, {"messages": [CHAT[0], {"role": "assistant", "content": None, "tool_calls": [call]}]}
    )
    assert (code, err) == (0, "")
    assert text(folder, sample, trained=True) == f"{shown}<|im_end|>"


@pytest.mark.parametrize(
    ("calls", "arguments", "told"),
    [("", "{}", "does not render tool_calls"), (OBJECT_CALLS, "oops", "tool-call arguments: got 'oops'")],
)
def test_tool_calls_that_cannot_be_rendered_are_refused(run, tokenizer_folder, calls, arguments, told):
    folder = tokenizer_folder(template(calls=calls))
    message = ANSWER | {"tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
    code, samples, err = run(folder, {"messages": [CHAT[0], message]})
    assert (code, samples) == (2, [])
    assert told in err


def test_a33_conversation_without_assistant_turn_is_counted(run, tokenizer_folder):
    folder = tokenizer_folder()
    code, (sample,), err = run(folder, {"messages": CHAT[:1]})
    assert code == 0
    assert not sample.loss_mask.any()
    assert "1 conversations have no assistant turn" in err
    code, _, err = run(folder, {"messages": CHAT[:1]}, options=["--history", "rerender"])
    assert code == 2
    assert "got no assistant turn" in err


@pytest.mark.parametrize(
    ("record", "told"),
    [
        ({"task_id": None, "messages": CHAT}, "task_id"),
        ({"messages": "hello"}, "messages: got 'hello'"),
        ({"messages": []}, "messages: got []"),
        ({"messages": [{"content": "x"}]}, "messages[0]: got {'content': 'x'}"),
        ({"messages": [ANSWER | {"tool_calls": ["f()"]}]}, "messages[0]: tool_calls: got ['f()']"),
        ({"messages": CHAT, "reward": "1"}, "reward: got '1'"),
        ({"messages": CHAT, "trial": 0}, "a duplicate"),
        ({"pool": CHAT, "turns": [{"prompt": [0], "completion": 9}]}, "turns[0]"),
        ({"pool": CHAT, "turns": [{"prompt": [0], "completion": 2}]}, "completion has role 'user'"),
        ({"pool": CHAT, "turns": 3}, "turns: got 3"),
    ],
)
def test_bad_transcripts_are_named(run, tokenizer_folder, record, told):
    code, samples, err = run(tokenizer_folder(), {"messages": CHAT}, record)
    assert (code, samples) == (2, [])
    assert "chats.jsonl, line 2" in err
    assert told in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("chat_template", "told"),
    [
        (template("{{ raise_exception('not' + ' today') }}"), "a plain question: the chat template fails: not today"),
        (template().replace("<|im_end|>", "."), "without a special token"),
        (
            template("{{ m.content if m.content != '1+1' else raise_exception('no sums') }}"),
            "sample 't/0': the chat template fails: no sums",
        ),
    ],
)
def test_templates_that_cannot_be_used_are_refused(run, tokenizer_folder, chat_template, told):
    code, _, err = run(tokenizer_folder(chat_template), {"messages": CHAT})
    assert code == 2
    assert told in err


def test_bad_arguments_are_refused(tool, run, tokenizer_folder, tmp_path):
    folder = tokenizer_folder()
    assert run(tmp_path, {"messages": CHAT})[0] == 2
    assert run(folder, {"messages": CHAT}, options=["--limit", "0"])[0] == 2
    assert run(folder, {"messages": CHAT}, options=["--tools", str(folder / "tokenizer_config.json")])[0] == 2
    assert run(folder, {"messages": CHAT}, options=["--out", str(tmp_path / "out.csv")])[0] == 2
    with pytest.raises(UsageError, match="No such file"):
        tool.read_transcripts(tmp_path / "absent.jsonl")


def recorded(tool, data_dir, name, out, *options):
    tokenizer = str(data_dir / "tokenizers" / "qwen3")
    assert tool.main([str(data_dir / name), "--tokenizer", tokenizer, "--out", str(out), *options]) == 0
    return read_rollouts(out, vocab_size=151_936)


def test_recorded_tau_bench_conversations(tool, data_dir, tmp_path):
    """Append-only ids are the recorded ones but for the newline at the end; rerendering is form "comb"."""
    options = ["--tools", str(data_dir / "tau_airline_tools.json"), "--limit", "3"]
    samples = recorded(tool, data_dir, "tau_airline_gpt4o.jsonl", tmp_path / "append.npz", *options)
    whole = {sample.sample_id: sample for sample in read_rollouts(data_dir / "tau_airline_gpt4o.qwen3.npz")}
    assert len(samples) == 3
    for sample in samples:
        np.testing.assert_array_equal(sample.tokens, whole[sample.sample_id].tokens[:-1])
        np.testing.assert_array_equal(sample.loss_mask, whole[sample.sample_id].loss_mask[:-1])
    options += ["--history", "rerender", "--template-arguments", '{"enable_thinking": false}']
    turns = recorded(tool, data_dir, "tau_airline_gpt4o.jsonl", tmp_path / "rerender.npz", *options)
    combs = read_rollouts(tmp_path / "append.npz", form="comb")
    assert [sample.sample_id for sample in turns] == [sample.sample_id for sample in combs]
    for turn, comb in zip(turns, combs):
        np.testing.assert_array_equal(turn.tokens, comb.tokens)
        np.testing.assert_array_equal(turn.loss_mask, comb.loss_mask)


def test_recorded_edited_histories(tool, data_dir, tmp_path, capsys):
    samples = recorded(tool, data_dir, "moatless_turns_subset.jsonl", tmp_path / "turns.jsonl", "--limit", "2")
    lines = (data_dir / "moatless_turns_subset.jsonl").read_text(encoding="utf-8").split("\n")[:2]
    assert len(samples) == sum(len(json.loads(line)["turns"]) for line in lines)
    assert len({sample.trajectory_id for sample in samples}) == 2
    assert "turns do not extend the turn before them" in capsys.readouterr().err
