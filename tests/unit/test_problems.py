"""Ingest: every reader, column layout, prompt form and finding, on rows that a person can check by eye."""

from __future__ import annotations

import csv
import gzip
import json
import math
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tseeds.config import BenchmarkConfig, ProblemsConfig, parse
from tseeds.context import Context
from tseeds.errors import UserError
from tseeds.problems import Benchmarks, Inputs, Prompter, final_answer, identity, ingest, run, same_key

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WITH_BOS = "{{ bos_token }}" + CHATML
NO_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system turn here') }}{% endif %}" + CHATML


def byte_tokenizer(*, template: str | None = CHATML, adds_bos: bool = False) -> Any:
    """A tokenizer that reads any text: one token a byte, special tokens as one."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<|bos|>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
        clean_up_tokenization_spaces=False,
    )
    made.chat_template = template
    if adds_bos:
        made.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single="<|bos|> $A", pair="<|bos|> $A $B", special_tokens=[("<|bos|>", made.bos_token_id)]
        )
    return made


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return byte_tokenizer()


def write_rows(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def settings_for(path: Any, **values: Any) -> ProblemsConfig:
    return ProblemsConfig(path=[str(p) for p in path] if isinstance(path, list) else str(path), **values)


ROWS = [
    {"id": "a", "problem": "What is 1 + 1?", "answer": "2"},
    {"id": "b", "problem": "What is 2 + 3?", "answer": "5"},
    {"id": "c", "problem": "Was ist 2³?", "answer": "8"},
]


def _as_format(folder: Path, name: str) -> Path:
    path = folder / name
    if name == "directory":
        path.mkdir()
        write_rows(path / "part-0.jsonl", ROWS[:1])
        pq.write_table(pa.Table.from_pylist(ROWS[1:]), path / "part-1.parquet")
        (path / "manifest.json").write_text("{}")
        (path / ".hidden.jsonl").write_text("broken")
        (path / "README.md").write_text("no data")
    elif name.endswith(".parquet"):
        pq.write_table(pa.Table.from_pylist(ROWS), path)
    elif name.endswith(".csv"):
        with open(path, "w", newline="", encoding="utf-8-sig") as handle:
            writer = csv.DictWriter(handle, ["id", "problem", "answer"])
            writer.writeheader()
            writer.writerows(ROWS)
    elif name.endswith(".json"):
        path.write_text(json.dumps(ROWS, indent=1), encoding="utf-8")
    elif name.endswith(".gz"):
        path.write_bytes(gzip.compress("".join(json.dumps(r) + "\n" for r in ROWS).encode()))
    else:
        write_rows(path, ROWS)
    return path


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.parquet", "a.csv", "a.jsonl.gz", "directory"])
def test_every_format_gives_the_same_problems(tmp_path: Path, tokenizer: Any, name: str) -> None:
    table, quarantine, report = ingest(settings_for(_as_format(tmp_path, name), prompt="plain"), tokenizer)
    assert table["problem_id"].to_pylist() == ["a", "b", "c"]
    assert table["gold"].to_pylist() == ["2", "5", "8"]
    assert [tokenizer.decode(ids) for ids in table["prompt_ids"].to_pylist()] == [r["problem"] for r in ROWS]
    assert quarantine.num_rows == 0
    assert (report["rows"], report["kept"], report["quarantined"]) == (3, 3, {})


def test_pattern_and_list_of_files(tmp_path: Path, tokenizer: Any) -> None:
    first, second = write_rows(tmp_path / "x1.jsonl", ROWS[:1]), write_rows(tmp_path / "x2.jsonl", ROWS[1:])
    for path in (tmp_path / "x*.jsonl", [first, second]):
        assert ingest(settings_for(path), tokenizer)[0]["problem_id"].to_pylist() == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("row", "problem", "gold"),
    [
        ({"question": "Q?", "answer": "He has 3 - 1 = <<3-1=2>>2 eggs.\n#### 2"}, "Q?", "2"),
        ({"Question": "no", "question_concat": "Body. Q?", "Answer": 8.0}, "Body. Q?", "8"),
        ({"problem": "Q?", "solution": r"Thus $\boxed{\frac{1}{2}}$."}, "Q?", r"\frac{1}{2}"),
        ({"problem": "Q?", "solution": r"So \boxed{1}, \boxed{2}.", "level": "Level 5"}, "Q?", "1, 2"),
        ({"problem": "Q?", "answer": "", "solution": r"\boxed{7}"}, "Q?", "7"),
        ({"prompt": "Q?", "ground_truth": 12}, "Q?", "12"),
        ({"prompt": "Q?", "answer": ["34"]}, "Q?", "34"),
        ({"prompt": "Q?", "answer": '["34"]'}, "Q?", "34"),
        (
            {
                "data_source": "math_dapo",
                "prompt": [{"role": "user", "content": "Q?"}],
                "ability": "MATH",
                "reward_model": {"style": "rule", "ground_truth": "34"},
                "extra_info": {"index": "9a9b"},
            },
            "Q?",
            "34",
        ),
        ({"messages": [{"role": "user", "content": "Q?"}, {"role": "assistant", "content": r"\boxed{3}"}]}, "Q?", "3"),
        (
            {"prompt": [{"role": "user", "content": [{"type": "text", "text": "Q?"}]}], "solution": "$$\\boxed{4}$$"},
            "Q?",
            "4",
        ),
    ],
)
def test_known_layouts_are_read_as_they_are(tmp_path: Path, tokenizer: Any, row: dict, problem: str, gold: str) -> None:
    table, quarantine, _ = ingest(settings_for(write_rows(tmp_path / "d.jsonl", [row])), tokenizer)
    assert (table["problem"].to_pylist(), table["gold"].to_pylist()) == ([problem], [gold]), quarantine.to_pylist()
    assert (
        tokenizer.decode(table["prompt_ids"][0].as_py())
        == f"<|im_start|>user\n{problem}<|im_end|>\n<|im_start|>assistant\n"
    )


def test_verl_parquet_keeps_its_source_and_its_system_turn(tmp_path: Path, tokenizer: Any) -> None:
    row = {
        "data_source": "gsm8k",
        "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Q?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "34"},
        "extra_info": {"split": "train", "index": 0},
    }
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "d.parquet")
    config = settings_for(tmp_path / "d.parquet", system="Unused, the data has its own.", template="{problem} Box it.")
    table = ingest(config, tokenizer)[0]
    assert table["source"].to_pylist() == ["gsm8k"]
    assert table["prompt"].to_pylist() == [
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nQ? Box it.<|im_end|>\n<|im_start|>assistant\n"
    ]


def test_columns_can_be_mapped_into_structs(tmp_path: Path, tokenizer: Any) -> None:
    row = {"problem": "wrong one", "text": "Q?", "answer": "0", "extra": {"value": "7", "hard": 3}}
    columns = {"problem": "text", "gold": "extra.value", "difficulty": "extra.hard"}
    table = ingest(settings_for(write_rows(tmp_path / "d.jsonl", [row]), columns=columns), tokenizer)[0]
    assert table.select(["problem", "gold", "difficulty"]).to_pylist() == [
        {"problem": "Q?", "gold": "7", "difficulty": "3"}
    ]


def test_a_mapped_column_that_is_not_there_is_named(tmp_path: Path, tokenizer: Any) -> None:
    file = write_rows(tmp_path / "d.jsonl", [{"prompt": "Q?", "answer": "0"}])
    with pytest.raises(UserError, match=r"1 no_problem: no column txt among prompt, answer"):
        ingest(settings_for(file, columns={"problem": "txt"}), tokenizer)


def test_final_answer_is_the_last_marker() -> None:
    assert final_answer("#### 1\nno\n#### 1,234") == "1,234"
    assert final_answer(r"\boxed{1} no, \boxed{\text{A}}") == r"\text{A}"
    assert final_answer("twelve") is None


def test_ids_come_from_the_data_only_when_unique(tmp_path: Path, tokenizer: Any) -> None:
    rows = [{"id": "../../etc/passwd", "problem": f"What is {n}?", "answer": str(n)} for n in range(3)]
    hashed = ingest(settings_for(write_rows(tmp_path / "d.jsonl", rows)), tokenizer)[0]["problem_id"].to_pylist()
    assert len(set(hashed)) == 3
    assert all(len(i) == 16 and int(i, 16) >= 0 for i in hashed)
    turned = ingest(settings_for(write_rows(tmp_path / "e.jsonl", rows[::-1])), tokenizer)[0]["problem_id"].to_pylist()
    assert turned == hashed[::-1]
    one = ingest(settings_for(write_rows(tmp_path / "f.jsonl", rows[:1])), tokenizer)[0]
    assert one["problem_id"].to_pylist() == ["../../etc/passwd"]


@pytest.mark.parametrize(
    ("template", "adds_bos"), [(CHATML, False), (CHATML, True), (WITH_BOS, False), (WITH_BOS, True)]
)
def test_one_beginning_of_sequence_at_most(template: str, adds_bos: bool) -> None:
    made = byte_tokenizer(template=template, adds_bos=adds_bos)
    text = "<|im_start|>user\nQ?<|im_end|>\n<|im_start|>assistant\n<think>\n"
    chat = Prompter(settings_for("x", prefill="<think>\n"), made)
    prompt = made.apply_chat_template([{"role": "user", "content": "Q?"}], tokenize=False, add_generation_prompt=True)
    (ids,) = chat.ids([prompt + "<think>\n"])
    assert ids.count(made.bos_token_id) == int(template == WITH_BOS)
    assert made.decode([i for i in ids if i != made.bos_token_id]) == text
    plain = Prompter(settings_for("x", prompt="plain"), made)
    bare, written = plain.ids(["Q?", "<|bos|>Q?"])
    assert bare.count(made.bos_token_id) == int(adds_bos)
    assert written.count(made.bos_token_id) == 1
    assert written[0] == made.bos_token_id


def test_chat_prompt_with_system_template_and_prefill(tmp_path: Path, tokenizer: Any) -> None:
    path = write_rows(tmp_path / "d.jsonl", [{"problem": r"Simplify {x} in \frac{1}{2}", "answer": "1"}])
    config = settings_for(path, system="Be brief.", template="{problem}\nWrite \\boxed{answer}.", prefill="<think>\n")
    assert ingest(config, tokenizer)[0]["prompt"].to_pylist() == [
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nSimplify {x} in \\frac{1}{2}\nWrite \\boxed{answer}.<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n"
    ]


def test_base_model_prompt_is_the_template_alone(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "d.jsonl", [{"problem": "What is {1} + 1?", "answer": "2"}])
    config = settings_for(path, prompt="plain", template="Question: {problem}\nAnswer:", prefill=" Let")
    made = byte_tokenizer(template=WITH_BOS, adds_bos=True)
    table = ingest(config, made)[0]
    assert table["prompt"].to_pylist() == ["Question: What is {1} + 1?\nAnswer: Let"]
    assert made.decode(table["prompt_ids"].to_pylist()[0]) == "<|bos|>Question: What is {1} + 1?\nAnswer: Let"
    with pytest.raises(ValueError, match="put its text into template"):
        settings_for(path, prompt="plain", system="Be brief.")


def test_mistakes_of_the_configuration_are_one_clear_line(tmp_path: Path, tokenizer: Any) -> None:
    path = write_rows(tmp_path / "d.jsonl", ROWS)
    with pytest.raises(UserError, match=r'no chat template; set problems.prompt = "plain"'):
        ingest(settings_for(path), byte_tokenizer(template=None))
    with pytest.raises(UserError, match=r"no system turn here; put the text of problems.system into problems.template"):
        ingest(settings_for(path, system="Be brief."), byte_tokenizer(template=NO_SYSTEM))
    with pytest.raises(UserError, match="no such file"):
        ingest(settings_for(tmp_path / "missing.jsonl"), tokenizer)
    (tmp_path / "d.pkl").write_bytes(b"\x80\x04N.")
    with pytest.raises(UserError, match="unknown format"):
        ingest(settings_for(tmp_path / "d.pkl"), tokenizer)
    with pytest.raises(UserError, match=r"name a file, such as hf://datasets/a/b/data/train"):
        ingest(settings_for("hf://datasets/a/b"), tokenizer)
    write_rows(tmp_path / "odd.jsonl", [{"prompt_text": "Q?", "answer": "2"}])
    with pytest.raises(UserError, match=r"no usable row among 1 .*prompt_text.*problems.columns"):
        ingest(settings_for(tmp_path / "odd.jsonl"), tokenizer)
    (tmp_path / "half.parquet").write_bytes(b"PAR1" + b"\0" * 50)
    with pytest.raises(UserError, match="not a whole Parquet file"):
        ingest(settings_for(tmp_path / "half.parquet"), tokenizer)


def test_bad_rows_are_quarantined_with_reason_and_position(tmp_path: Path, tokenizer: Any) -> None:
    good = b'{"problem": "What is %d?", "answer": "%d"}\n'
    lines = [
        (good % (1, 1), None),
        (b'{"problem": "What is 2?", "answer": \n', "unreadable"),
        (b'["a list"]\n', "unreadable"),
        (b'{"problem": "caf\xe9", "answer": "1"}\n', "unreadable"),
        (b"[" * 100_000 + b"\n", "unreadable"),
        (b'{"problem": "lone \\ud800 half", "answer": "1"}\n', "bad_problem"),
        (b'{"problem": "What is 3?", "answer": NaN}\n', "bad_gold"),
        (b'{"problem": "  ", "answer": "1"}\n', "no_problem"),
        (b'{"problem": "What is 4?", "answer": null}\n', "no_gold"),
        (b'{"problem": "What is 5?"}\n', "no_gold"),
        (b'{"problem": "What is 6?", "solution": "It is six."}\n', "no_gold"),
        (b'{"problem": {"deep": 1}, "answer": "1"}\n', "no_problem"),
        (b'{"messages": [{"role": "tool", "content": "x"}], "answer": "1"}\n', "bad_messages"),
        (b'{"problem": "Say <|im_end|> now", "answer": "1"}\n', "special_token"),
        (b'{"problem": "Find \\frac{m}{n}", "answer": "1"}\n', "damaged_text"),
        (b'{"problem": "' + b"long " * 300 + b'", "answer": "1"}\n', "overlong"),
        (good % (7, 7), None),
    ]
    path = tmp_path / "d.jsonl"
    path.write_bytes(b"".join(line for line, _ in lines))
    table, quarantine, report = ingest(settings_for(path), tokenizer)
    assert table["problem"].to_pylist() == ["What is 1?", "What is 7?"]
    expected = {n: reason for n, (_, reason) in enumerate(lines) if reason}
    assert dict(zip(quarantine["row"].to_pylist(), quarantine["reason"].to_pylist(), strict=True)) == expected
    assert report["rows"] == len(lines) == report["kept"] + sum(report["quarantined"].values())
    assert set(quarantine["file"].to_pylist()) == {str(path)}


def test_ragged_csv_rows_are_quarantined(tmp_path: Path, tokenizer: Any) -> None:
    path = tmp_path / "d.csv"
    path.write_bytes(b'problem,answer\nWhat is 1?,1\nWhat, is 2?,2\n"What is\n3?",3\nnot \xff utf8,4\n')
    table, quarantine, _ = ingest(settings_for(path), tokenizer)
    assert table["problem"].to_pylist() == ["What is 1?", "What is\n3?"]
    assert quarantine.select(["row", "reason"]).to_pylist() == [
        {"row": 1, "reason": "unreadable"},
        {"row": 3, "reason": "bad_problem"},
    ]


def test_files_of_one_directory_may_disagree_about_types(tmp_path: Path, tokenizer: Any) -> None:
    pq.write_table(pa.table({"problem": ["What is 1?"], "answer": [1]}), tmp_path / "p0.parquet")
    pq.write_table(pa.table({"problem": ["What is 2?"], "answer": ["2"]}), tmp_path / "p1.parquet")
    assert ingest(settings_for(tmp_path), tokenizer)[0]["gold"].to_pylist() == ["1", "2"]


CONFLICT = [
    {"id": "a", "problem": "Compute $1 + 1$.", "answer": "2"},
    {"id": "b", "problem": "compute \\(1+1\\)", "answer": "3"},
    {"id": "c", "problem": "Compute $1 - 1$.", "answer": "0"},
    {"id": "d", "problem": "Halve 1.", "answer": "1/2"},
    {"id": "e", "problem": "Halve 1", "answer": "0.5"},
    {"id": "f", "problem": "Halve  1.", "answer": "1/2"},
]


def test_conflicts_take_all_rows_and_duplicates_leave_the_first(tmp_path: Path, tokenizer: Any) -> None:
    table, quarantine, _ = ingest(settings_for(write_rows(tmp_path / "d.jsonl", CONFLICT)), tokenizer)
    assert table["problem_id"].to_pylist() == ["c", "d"]
    reasons = dict(zip(quarantine["problem_id"].to_pylist(), quarantine["reason"].to_pylist(), strict=True))
    assert reasons == {"a": "conflicting_gold", "b": "conflicting_gold", "e": "duplicate", "f": "duplicate"}


@pytest.mark.parametrize("closing", ["", 'Q4?,4 "\n'])
def test_a_stray_quote_spoils_its_own_line_alone(closing: str, tmp_path: Path, tokenizer: Any) -> None:
    path = tmp_path / "d.csv"
    path.write_text('problem,answer\nQ1?,1\n"Q2?,2\nQ3?,3\n' + closing + '"Q5\nof two lines?",5\nQ6?,6\n')
    table, quarantine, report = ingest(settings_for(path), tokenizer)
    assert table["gold"].to_pylist() == ["1", "3", "5", "6"] or closing
    assert {"1", "3", "5", "6"} <= set(table["gold"].to_pylist())
    assert "unreadable" in quarantine["reason"].to_pylist()
    assert report["rows"] == table.num_rows + quarantine.num_rows == 5 + bool(closing)


def test_a_row_that_goes_does_not_take_its_sound_copy_with_it(tmp_path: Path, tokenizer: Any) -> None:
    damaged = [{"problem": "Q \x00?", "answer": "1"}, {"problem": "Q ?", "answer": "1"}]
    damaged += [{"problem": "R?", "answer": "see the figure above please"}, {"problem": "R?", "answer": "5"}]
    table, quarantine, _ = ingest(settings_for(write_rows(tmp_path / "d.jsonl", damaged)), tokenizer)
    assert table["gold"].to_pylist() == ["1", "5"]
    assert sorted(quarantine["reason"].to_pylist()) == ["damaged_text", "unparsable_gold"]


def test_turns_that_a_plain_prompt_would_drop_are_a_finding(tmp_path: Path, tokenizer: Any) -> None:
    turns = [
        {"role": r, "content": c} for r, c in (("user", "Let x=3."), ("assistant", "ok"), ("user", "What is x+1?"))
    ]
    path = write_rows(tmp_path / "d.jsonl", [{"prompt": turns, "answer": "4"}, {"problem": "1+1?", "answer": "2"}])
    table, quarantine, _ = ingest(settings_for(path, prompt="plain"), tokenizer)
    assert table["gold"].to_pylist() == ["2"]
    assert "conversation of several turns" in quarantine["detail"][0].as_py()


def test_each_finding_has_its_policy(tmp_path: Path, tokenizer: Any) -> None:
    path = write_rows(tmp_path / "d.jsonl", CONFLICT)
    kept = ingest(settings_for(path, findings={"conflicting_gold": "keep", "duplicate": "keep"}), tokenizer)
    assert kept[0]["problem_id"].to_pylist() == ["a", "b", "c", "d", "e", "f"]
    assert kept[2]["findings"]["conflicting_gold"]["rows"] == 2
    with pytest.raises(UserError, match=r"d.jsonl row 0: conflicting_gold \(golds 2 \| 3\), 2 such rows"):
        ingest(settings_for(path, findings={"conflicting_gold": "fail"}), tokenizer)
    write_rows(path, [*ROWS, {"problem": "Q?"}])
    with pytest.raises(UserError, match=r"row 3: unusable \(no_gold"):
        ingest(settings_for(path, findings={"unusable": "fail"}), tokenizer)


def test_unparsable_golds_are_found_by_the_grader(tmp_path: Path, tokenizer: Any) -> None:
    rows = [
        {"problem": "1 2 -> 3", "gold": {"numbers": [1, 2], "target": 3}},
        {"problem": "1 2 -> 4", "gold": {"numbers": [1, 2]}},
        {"problem": "1 2 -> 5", "gold": "five"},
    ]
    table, quarantine, _ = ingest(settings_for(write_rows(tmp_path / "d.jsonl", rows), task="countdown"), tokenizer)
    assert table["gold"].to_pylist() == ['{"numbers":[1,2],"target":3}']
    assert quarantine["reason"].to_pylist() == ["unparsable_gold"] * 2


def test_limit_counts_good_rows(tmp_path: Path, tokenizer: Any) -> None:
    path = write_rows(tmp_path / "d.jsonl", [{"problem": ""}, *ROWS])
    assert ingest(settings_for(path, limit=2), tokenizer)[0]["problem_id"].num_chunks == 1
    assert ingest(settings_for(path, limit=2), tokenizer)[2]["kept"] == 2


def test_same_key_keeps_operators_and_decimals_apart() -> None:
    assert same_key("Find $f(x) = 2x$") == same_key("find \\( f (x)=2 x \\)")
    assert same_key("( 2 + 3 ) * 4") != same_key("2 + 3 * 4") == same_key("$2+3*4$.")
    assert same_key("Find $x$ (in metres).") == same_key("Find \\(x\\) in metres.")
    for a, b in (("2 + 3", "2 - 3"), ("0.5", "05"), ("1 2", "12"), ("数学", "数字")):
        assert same_key(a) != same_key(b)


def test_overlap_counts_ngrams_of_the_shorter_text() -> None:
    known = "one two three four five six seven eight nine ten"
    index = Benchmarks([("b:0", known)], ngram=8, overlap=0.6)
    assert index.closest(known.upper() + "!") == (1.0, "b:0")
    assert index.closest("zero " + known + " eleven twelve") == (1.0, "b:0")
    # 4 n-grams of the text, 3 of the benchmark; only the 2 that miss "one" are shared: too few to say anything.
    assert index.closest("two three four five six seven eight nine ten eleven twelve") is None
    longer = Benchmarks([("b:0", known + " eleven twelve thirteen")], ngram=8, overlap=0.6)
    overlap, _ = longer.closest("two three four five six seven eight nine ten eleven x y") or (math.nan, "")
    assert overlap == pytest.approx(3 / 5)


def _shared_rows(shared: Path, name: str) -> list[dict]:
    return [json.loads(line) for line in (shared / "data" / "damaged_rows" / f"{name}.jsonl").read_text().splitlines()]


def test_real_damaged_texts_are_all_found(shared: Path, tmp_path: Path, tokenizer: Any) -> None:
    rows = [{k: r[k] for k in ("id", "problem", "answer")} for r in _shared_rows(shared, "damaged_text")]
    _, _, report = ingest(settings_for(write_rows(tmp_path / "d.jsonl", [*rows, *ROWS])), tokenizer)
    assert report["findings"]["damaged_text"]["rows"] == len(rows) == 42


def test_real_conflicting_golds_are_all_found(shared: Path, tmp_path: Path, tokenizer: Any) -> None:
    rows = [
        {"id": i, "problem": r["problem"], "answer": a}
        for r in _shared_rows(shared, "conflicting_golds")
        for i, a in zip(r["ids"], r["answers"], strict=True)
    ]
    table, quarantine, _ = ingest(settings_for(write_rows(tmp_path / "d.jsonl", [*rows, *ROWS])), tokenizer)
    assert quarantine["reason"].to_pylist() == ["conflicting_gold"] * len(rows)
    assert table.num_rows == len(ROWS)


def test_real_wrong_golds_are_found_where_the_row_shows_it(shared: Path, tmp_path: Path, tokenizer: Any) -> None:
    rows = _shared_rows(shared, "wrong_golds")
    data = [{"id": r["id"], "problem": r["problem"], "answer": r["bad_gold"]} for r in rows]
    config = settings_for(write_rows(tmp_path / "d.jsonl", [*data, *ROWS]), max_prompt_tokens=4096)
    _, quarantine, report = ingest(config, tokenizer)
    empty = sum(r["bad_gold"] == "" for r in rows)
    assert quarantine["reason"].to_pylist().count("no_gold") == empty
    # The wording shows the rest, but for one wrong sign, which shows nowhere in the row.
    assert (empty, report["findings"]["partial_gold"]["rows"]) == (3, 8)


def test_real_contamination_is_all_found(shared: Path) -> None:
    rows = _shared_rows(shared, "contamination")
    names = {r["bench"]: r["bench"] for r in rows} | {"olympiadbench": "olympiadbench_math_en"}
    from tseeds.problems import benchmark_texts

    texts = benchmark_texts(
        [
            BenchmarkConfig(name=name, path=str(shared / "data" / "bench" / f"{file}.jsonl"))
            for name, file in names.items()
        ]
    )
    index = Benchmarks(texts, ngram=8, overlap=0.6)
    found = [index.closest(r["train_problem"]) for r in rows]
    missed = [r["train_id"] for r, close in zip(rows, found, strict=True) if close is None]
    assert missed == []
    assert sum(close[1] == f"{r['bench']}:{r['bench_id']}" for r, close in zip(rows, found, strict=True) if close) > 200


def test_a_whole_public_training_set_against_all_benchmarks(shared: Path, tokenizer: Any) -> None:
    benchmarks = [
        BenchmarkConfig(name=p.stem, path=str(p)) for p in sorted((shared / "data" / "bench").glob("*.jsonl"))
    ]
    config = settings_for(shared / "data" / "train" / "dapo_math_17k.jsonl", max_prompt_tokens=8192, prompt="plain")
    start = time.process_time()
    table, quarantine, report = ingest(config, tokenizer, benchmarks=benchmarks)
    assert time.process_time() - start < 60
    assert report["rows"] == 12817 == table.num_rows + quarantine.num_rows
    # Two writings of one problem with different golds, seen by eye in the data.
    assert {"dapo-04577", "dapo-07907"} <= set(quarantine["problem_id"].to_pylist())
    assert report["quarantined"]["conflicting_gold"] == 10


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(
        st.dictionaries(
            st.sampled_from(
                ["id", "problem", "question", "prompt", "messages", "answer", "gold", "solution", "reward_model"]
            ),
            st.recursive(
                st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=12),
                lambda inner: (
                    st.lists(inner, max_size=3)
                    | st.dictionaries(st.sampled_from(["role", "content", "text", "ground_truth"]), inner, max_size=3)
                ),
                max_leaves=5,
            ),
        ),
        min_size=1,
        max_size=6,
    )
)
def test_hostile_rows_give_quarantine_or_one_clear_error(tmp_path: Path, tokenizer: Any, rows: list[dict]) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in [*rows, ROWS[0]]), encoding="utf-8")
    table, quarantine, report = ingest(settings_for(path), tokenizer)
    assert table.num_rows + quarantine.num_rows == report["rows"] == len(rows) + 1
    assert len(set(table["problem_id"].to_pylist())) == table.num_rows


def pipeline(path: Path, policy: Path, **problems: Any) -> Any:
    return parse({"policy": {"path": str(policy)}, "problems": {"path": str(path), **problems}})


def test_stage_commits_problems_quarantine_and_report(tmp_path: Path) -> None:
    policy = tmp_path / "policy"
    byte_tokenizer().save_pretrained(policy)
    (policy / "config.json").write_text('{"model_type": "llama"}')
    path = write_rows(tmp_path / "d.jsonl", [*ROWS, {"problem": "Q?"}])
    config = pipeline(path, policy)
    with Context(config) as context:
        manifest = run(config, Inputs(policy), tmp_path / "out", context)
    assert manifest.rows == 3
    assert manifest.facts["quarantined"] == {"no_gold": 1}
    assert pq.read_table(tmp_path / "out" / "quarantine.parquet")["row"].to_pylist() == [3]
    assert json.loads((tmp_path / "out" / "report.json").read_text())["kept"] == 3
    assert pq.read_table(tmp_path / "out" / "part-00000.parquet")["problem_id"].to_pylist() == ["a", "b", "c"]


def test_key_follows_content_and_not_places(tmp_path: Path) -> None:
    policy = tmp_path / "policy"
    byte_tokenizer().save_pretrained(policy)
    path = write_rows(tmp_path / "d.jsonl", ROWS)
    first = identity(pipeline(path, policy), Inputs(policy))
    moved = write_rows(tmp_path / "elsewhere.jsonl", ROWS)
    assert identity(pipeline(moved, policy), Inputs(policy)).key == first.key
    assert identity(pipeline(path, policy, template="{problem}!"), Inputs(policy)).differences(first) == [
        'problems.template "{problem}" -> "{problem}!"'
    ]
    write_rows(path, ROWS[:2])
    assert identity(pipeline(path, policy), Inputs(policy)).differences(first) == ["input data 0 changed"]
    write_rows(path, ROWS)
    byte_tokenizer(template=WITH_BOS).save_pretrained(policy)
    changed = identity(pipeline(path, policy), Inputs(policy)).differences(first)
    assert changed
    assert all("tokenizer" in line for line in changed)


VERIFIER = '''
def largest_is_right(gold, response):
    """1.0 for a response that ends on the largest number of the problem; half for naming it anywhere."""
    words = response.replace(",", " ").split()
    if not words:
        return 0.0
    return 1.0 if words[-1].strip(".") == gold else 0.5 if gold in words else 0.0
'''


def test_a_user_brings_a_task_in_twenty_lines(tmp_path: Path, tokenizer: Any) -> None:
    from tseeds.grading import Grader, GradingOptions

    verifier = tmp_path / "largest.py"
    verifier.write_text(VERIFIER)
    task = f"python:{verifier}:largest_is_right"
    path = write_rows(tmp_path / "d.jsonl", [{"problem": "Which is largest: 3, 9 or 7?", "gold": 9}])
    row = ingest(settings_for(path, task=task), tokenizer)[0].to_pylist()[0]
    with Grader(GradingOptions(task=row["task"])) as grader:
        responses = ["It is 9.", "9 is larger than 7", "7"]
        assert [g.reward for g in grader.grade([(row["gold"], r) for r in responses])] == [1.0, 0.5, 0.0]


def test_benchmarks_keep_every_row_that_can_be_graded(tmp_path: Path, tokenizer: Any) -> None:
    from tseeds.evaluate import problems_config

    path = write_rows(tmp_path / "d.jsonl", CONFLICT)
    config = pipeline(tmp_path / "train.jsonl", tmp_path)
    table = ingest(problems_config(config, BenchmarkConfig(name="b", path=str(path))), tokenizer)[0]
    assert table["problem_id"].to_pylist() == [r["id"] for r in CONFLICT]


def test_reasoning_gym_is_a_source_of_problems(tokenizer: Any) -> None:
    pytest.importorskip("reasoning_gym", reason="optional extra tseeds[gym], not in the lock: it pulls 12 packages")
    source = "reasoning-gym:basic_arithmetic?size=20&seed=1&min_terms=2&max_terms=3"
    table = ingest(settings_for(source, findings={"duplicate": "keep", "conflicting_gold": "keep"}), tokenizer)[0]
    again = ingest(settings_for(source, findings={"duplicate": "keep", "conflicting_gold": "keep"}), tokenizer)[0]
    assert table.num_rows == 20
    assert table.equals(again)
    assert set(table["source"].to_pylist()) == {"reasoning-gym:basic_arithmetic"}
    simple = [r for r in table.to_pylist() if "/" not in r["problem"]]
    assert simple
    for row in simple:
        words = row["problem"].rstrip(".?").split()
        expression = " ".join(w for w in words if set(w) <= set("0123456789+-*()"))
        assert int(row["gold"]) == eval(expression, {"__builtins__": {}}), row
    with pytest.raises(UserError, match="reasoning-gym refuses it"):
        ingest(settings_for("reasoning-gym:no-such-thing"), tokenizer)


def test_a_missing_extra_is_named(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(UserError, match=r"not installed; pip install 'tseeds\[gym\]'"):
        ingest(settings_for("reasoning-gym:basic_arithmetic"), tokenizer)
