"""Writes the text-to-SQL corpus: English questions, their SQL, the SQLite databases, and an untrained model.

    python examples/text-to-sql/generate.py

Writes into `data/` beside this file, byte-identical every time:

    train.jsonl, eval.jsonl     one question per line: question, columns, sql, database, template
    databases/<name>.sqlite     one table named `data` each
    model/                      tokenizer (trained on train.jsonl only) and configuration of a small T5, no weights

As in WikiSQL, a query is SELECT [aggregate] column FROM data WHERE column operator value AND ..., and all its parts are
in the question or in the header of the table. The vocabulary is in four YAML files beside this one. Training and
evaluation have no tables, headers, values or question templates in common.
"""

import argparse
import json
import math
import re
import shutil
import sqlite3
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Literal

import yaml

Split = Literal["training", "evaluation"]
Cell = str | int

FOLDER = Path(__file__).parent
ROWS: dict[Split, int] = {"training": 80_000, "evaluation": 400}
TABLES_PER_DOMAIN: dict[Split, int] = {"training": 8, "evaluation": 1}
YEARS = (1900, 2024)
# One in six of the possible values, chosen by hash, is used only in evaluation.
HELD_OUT_ONE_IN = 6
# What a question asks for, and how often.
INTENTS = {"lookup": 14, "value": 26, "entity": 20, "count": 12, "extreme": 14, "average": 7, "total": 7}
CONDITIONS = {1: 60, 2: 30, 3: 10}
OPERATORS = {"above": ">", "below": "<", "equal": "="}
VOCABULARY_SIZE = 1536


def read_words(name: str) -> dict[str, Any]:
    """One of the YAML files beside this one: `columns`, `domains`, `templates` or `values`."""
    words: dict[str, Any] = yaml.safe_load((FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))
    return words


COLUMNS, DOMAINS, TEMPLATES, VALUES = (read_words(name) for name in ("columns", "domains", "templates", "values"))


@dataclass(frozen=True)
class Table:
    """A table of one domain. The first column has the names of the entities."""

    name: str
    entity: str
    header: list[str]
    rows: list[list[Cell]]

    def is_number(self, column: str) -> bool:
        """Whether the column has numbers (including years)."""
        return isinstance(self.rows[0][self.header.index(column)], int)

    @property
    def domain(self) -> dict[str, Any]:
        """The domain of the entities, from domains.yaml."""
        domain: dict[str, Any] = DOMAINS[self.entity]
        return domain


@dataclass(frozen=True)
class Condition:
    """`column operator value`, where operator is one of `equal`, `above` and `below`."""

    column: str
    operator: str
    value: Cell

    def sql(self) -> str:
        """The condition as SQL."""
        value = self.value if isinstance(self.value, int) else f"'{self.value}'"
        return f"{self.column} {OPERATORS[self.operator]} {value}"


def is_held_out(value: Cell) -> bool:
    """Whether only evaluation may use this value ("The Silent Star" counts as "Silent Star")."""
    return zlib.crc32(str(value).removeprefix("The ").encode()) % HELD_OUT_ONE_IN == 0


def text(kind: str, split: Split, rng: Random) -> str:
    """A text value of the split, such as a person's or a town's name."""
    if kind in VALUES["words"]:
        return str(rng.choice(VALUES["words"][kind][split == "evaluation"]))
    while True:
        pattern = rng.choice(VALUES["kinds"][kind])
        value = pattern.format(**{part: rng.choice(words) for part, words in VALUES["parts"].items()})
        if is_held_out(value) == (split == "evaluation"):
            return str(value)


def number(bounds: Sequence[int], split: Split, rng: Random) -> int:
    """A number of the split within the bounds; each order of magnitude is equally likely."""
    lowest, highest = bounds
    while True:
        value = round(lowest * math.exp(rng.random() * math.log(highest / lowest)))
        if is_held_out(value) == (split == "evaluation"):
            return value


def cells(kind: str | list[int], count: int, split: Split, rng: Random) -> list[Cell]:
    """The cells of one column. Text values repeat, so that a condition can match several rows."""
    if kind == "year" or isinstance(kind, list):
        bounds: Sequence[int] = YEARS if isinstance(kind, str) else kind
        return [number(bounds, split, rng) for _ in range(count)]
    pool = [text(kind, split, rng) for _ in range(rng.randint(count // 3, count))]
    return [rng.choice(pool) for _ in range(count)]


def make_table(name: str, entity: str, others: list[str], split: Split, rng: Random) -> Table:
    """A table of 10 to 18 different entities with the given further columns."""
    names: dict[str, None] = {}
    count = rng.randint(10, 18)
    while len(names) < count:
        names[text(DOMAINS[entity]["name"], split, rng)] = None
    columns = [list(names), *(cells(COLUMNS[column]["kind"], count, split, rng) for column in others)]
    return Table(name, entity, [entity, *others], [list(row) for row in zip(*columns, strict=True)])


def make_tables(rng: Random) -> dict[Split, list[Table]]:
    """The tables of all domains. No two tables have the same columns, so evaluation has its own headers."""
    tables: dict[Split, list[Table]] = {"training": [], "evaluation": []}
    for entity, domain in DOMAINS.items():
        headers: set[frozenset[str]] = set()
        for split, count in TABLES_PER_DOMAIN.items():
            for index in range(count):
                others: list[str] = []
                while not others or frozenset(others) in headers:
                    others = rng.sample(domain["columns"], rng.randint(4, 5))
                headers.add(frozenset(others))
                name = f"{entity}_{index}" if split == "training" else f"{entity}_held_out_{index}"
                tables[split].append(make_table(name, entity, others, split, rng))
    return tables


def write_database(table: Table, path: Path) -> None:
    """The table as an SQLite file, in a table named `data`."""
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA synchronous = OFF")
        types = ("INTEGER" if table.is_number(column) else "TEXT" for column in table.header)
        fields = ", ".join(f"{column} {kind}" for column, kind in zip(table.header, types, strict=True))
        connection.execute(f"CREATE TABLE data ({fields})")
        connection.executemany(f"INSERT INTO data VALUES ({', '.join('?' * len(table.header))})", table.rows)
    connection.close()


def make_condition(table: Table, column: str, row: list[Cell], split: Split, rng: Random) -> Condition:
    """A condition on the column that the row fulfils."""
    cell = row[table.header.index(column)]
    if isinstance(cell, str):
        return Condition(column, "equal", cell)
    operator = rng.choices(["equal", "above", "below"], [3, 4, 4])[0]
    if operator == "equal":
        return Condition(column, operator, cell)
    is_year = COLUMNS[column]["kind"] == "year"
    lowest, highest = YEARS if is_year else COLUMNS[column]["kind"]
    nearby = (
        range(max(lowest, cell * 2 // 3), cell) if operator == "above" else range(cell + 1, min(highest, cell * 3 // 2))
    )
    bounds = [
        value for value in rng.sample(nearby, min(len(nearby), 30)) if is_held_out(value) == (split == "evaluation")
    ]
    return Condition(column, operator, bounds[0]) if bounds else Condition(column, "equal", cell)


def condition_words(table: Table, condition: Condition, split: Split, rng: Random) -> str:
    """The condition in English, in the column's own idiom or with a general wording that names the column."""
    facts = COLUMNS[condition.column]
    general = TEMPLATES[split][condition.operator]
    special = list(facts.get(condition.operator, []))
    if condition.column == "year":
        special += TEMPLATES[split][f"{condition.operator}_year"]
    if facts.get("is") == "are" and condition.operator != "equal":
        special += TEMPLATES[split][f"{condition.operator}_plural"]
    wording = rng.choice(special if special and rng.random() < 0.4 else general)
    plural = facts.get("is") == "are"
    return str(
        wording.format(
            column=condition.column,
            a_column=condition.column if plural else f"a {condition.column}",
            value=condition.value,
            happened=table.domain.get("year", ""),
            **{"is": facts.get("is", "is")},
        )
    )


def choose_columns(table: Table, intent: str, rng: Random) -> tuple[str, list[str]] | None:
    """The column asked for and the columns of the conditions; None if the table has no suitable ones."""
    entity, *others = table.header
    if intent == "lookup":
        return rng.choice(others), [entity]
    if intent in ("entity", "count"):
        selected = entity
    else:
        fitting = others
        if intent != "value":
            fitting = [column for column in others if table.is_number(column) and COLUMNS[column]["kind"] != "year"]
        if not fitting:
            return None
        selected = rng.choice(fitting)
    number_of_conditions = rng.choices(list(CONDITIONS), list(CONDITIONS.values()))[0]
    return selected, rng.sample([column for column in others if column != selected], number_of_conditions)


def make_question(table: Table, split: Split, rng: Random) -> dict[str, str] | None:
    """One row of the corpus; None if the table has no suitable column for the question."""
    intent = rng.choices(list(INTENTS), list(INTENTS.values()))[0]
    chosen = choose_columns(table, intent, rng)
    if chosen is None:
        return None
    selected, columns = chosen
    row = rng.choice(table.rows)
    conditions = [make_condition(table, column, row, split, rng) for column in columns]
    rng.shuffle(conditions)
    aggregate = {"count": "COUNT", "average": "AVG", "total": "SUM"}.get(intent, "")
    if intent == "extreme":
        aggregate = rng.choice(["MAX", "MIN"])
    template = rng.choice(TEMPLATES[split][intent])
    question = template.format(
        select=selected,
        entity=table.entity,
        entities=table.domain["plural"],
        name=row[0],
        extreme=rng.choice(TEMPLATES["extremes"][aggregate]) if intent == "extreme" else "",
        where=" and ".join(condition_words(table, condition, split, rng) for condition in conditions)
        if intent != "lookup"
        else "",
        **{"is": COLUMNS.get(selected, {}).get("is", "is")},
    )
    return {
        "question": re.sub(r"\ba (?=[aeiou])", "an ", question),
        "columns": " ".join(table.header),
        "sql": f"SELECT {f'{aggregate}({selected})' if aggregate else selected} FROM data"
        f" WHERE {' AND '.join(condition.sql() for condition in conditions)}",
        "database": table.name,
        "template": template,
    }


def make_questions(tables: list[Table], count: int, split: Split, rng: Random) -> Iterator[dict[str, str]]:
    """`count` different questions, spread over the tables and shuffled."""
    seen: set[tuple[str, str]] = set()
    while len(seen) < count:
        row = make_question(rng.choice(tables), split, rng)
        if row is not None and (row["database"], row["question"]) not in seen:
            seen.add((row["database"], row["question"]))
            yield row


def train_tokenizer(rows: list[dict[str, str]]) -> Any:
    """A byte-level BPE tokenizer in which a word has the same tokens in the question, in the header and in SQL.

    Writing SQL is then mostly copying tokens, which a small model can learn. A word includes the space before it, and
    digits form pairs. Before tokenization, a space is added in `COUNT(points)` and `= 'Ashford'`; the decoder removes
    it.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Replace(Regex(r"(?<=[=<>] ')(?=\S)"), " "), normalizers.Replace(Regex(r"(?<=[A-Z]\()(?=\S)"), " ")]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r" ?[A-Za-z]+| ?[0-9]{1,2}| ?[^A-Za-z0-9 ]"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.ByteLevel(),
            decoders.Fuse(),
            decoders.Replace(Regex(r"(?<=[=<>] ') "), ""),
            decoders.Replace(Regex(r"(?<=[A-Z]\() "), ""),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=["<pad>", "</s>", "<unk>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = (text for row in rows for text in (f"{row['question']} | {row['columns']}", row["sql"]))
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
        model_max_length=128,
    )


def write_model(tokenizer: Any, folder: Path) -> None:
    """Tokenizer and configuration of a small T5, without weights."""
    from transformers import T5Config

    tokenizer.save_pretrained(folder)
    config = T5Config(
        architectures=["T5ForConditionalGeneration"],
        vocab_size=len(tokenizer),
        d_model=128,
        d_kv=16,
        num_heads=8,
        d_ff=256,
        num_layers=3,
        num_decoder_layers=2,
        relative_attention_num_buckets=32,
        relative_attention_max_distance=64,
        dropout_rate=0.0,
        initializer_factor=0.5,  # at 1, the model learns copying too late for five minutes of training; at 0.2 never
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    config.decoder_start_token_id = tokenizer.pad_token_id
    config.save_pretrained(folder)


def generate(output: Path, seed: int = 42, rows: dict[Split, int] = ROWS) -> None:
    """Write the whole corpus to the folder `output`, and replace what is there."""
    shutil.rmtree(output, ignore_errors=True)
    (output / "databases").mkdir(parents=True)
    rng = Random(seed)
    files: dict[Split, str] = {"training": "train.jsonl", "evaluation": "eval.jsonl"}
    for split, tables in make_tables(rng).items():
        for table in tables:
            write_database(table, output / "databases" / f"{table.name}.sqlite")
        questions = list(make_questions(tables, rows[split], split, rng))
        lines = "".join(json.dumps(question) + "\n" for question in questions)
        (output / files[split]).write_text(lines, encoding="utf-8")
        if split == "training":
            write_model(train_tokenizer(questions), output / "model")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Write the text-to-SQL corpus.")
    parser.add_argument("--output", type=Path, default=FOLDER / "data", help="folder to write (default: data/ here)")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--training-rows", type=int, default=ROWS["training"], help="questions in train.jsonl")
    arguments = parser.parse_args()
    generate(arguments.output, arguments.seed, ROWS | {"training": arguments.training_rows})


if __name__ == "__main__":
    main()
