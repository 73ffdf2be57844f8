"""The baseline that a model has to beat: the SQL of the nearest training question, with columns and values replaced.

    python examples/text-to-sql/baseline.py

The nearest question has the highest cosine similarity of TF-IDF vectors over words (Salton & Buckley, 1988). Columns
that the table does not have are replaced by columns that the question names, and values by the names and numbers in the
question, in order. Prints the execution accuracy on eval.jsonl.
"""

import argparse
import json
import math
import re
import sqlite3
from collections import Counter
from pathlib import Path

import numpy as np

FOLDER = Path(__file__).parent
CONDITION = re.compile(r"(\w+) ([=<>]) ('[^']*'|\d+)")
SELECT = re.compile(r"SELECT (?:(\w+)\()?(\w+)\)? FROM")
# A name is one or more capitalised words, but not the first word of the question, nor "I".
NAME = re.compile(r"(?<!^)\b(?!I\b)[A-Z]\w*(?: (?:of )?[A-Z]\w*)*")
NUMBER = re.compile(r"\b\d+\b")

Row = dict[str, str]


def words(question: str) -> list[str]:
    """The words of a question, in lower case."""
    return re.findall(r"\w+", question.lower())


class NearestQuestion:
    """Finds the training question that is most similar to a given one."""

    def __init__(self, rows: list[Row]) -> None:
        self.rows = rows
        postings: dict[str, list[int]] = {}
        counts = [Counter(words(row["question"])) for row in rows]
        for index, count in enumerate(counts):
            for word in count:
                postings.setdefault(word, []).append(index)
        self.postings = {word: np.array(indices) for word, indices in postings.items()}
        self.weights = {word: math.log(len(rows) / len(indices)) for word, indices in postings.items()}
        self.lengths = np.array([math.sqrt(sum(self.weights[word] ** 2 for word in count)) for count in counts])

    def __call__(self, question: str) -> Row:
        """The training row with the highest cosine similarity."""
        scores = np.zeros(len(self.rows))
        for word in set(words(question)) & self.postings.keys():
            scores[self.postings[word]] += self.weights[word] ** 2
        return self.rows[int(np.argmax(scores / np.maximum(self.lengths, 1e-9)))]


def map_columns(sql_columns: list[str], neighbour: Row, row: Row) -> list[str]:
    """A column of the row's table for each column of the neighbour's SQL."""
    source, target = neighbour["columns"].split(), row["columns"].split()
    asked = words(row["question"])
    # Nearly every question names the entity, which is the first column, so a match with it is no evidence.
    named = sorted((column for column in target[1:] if column in asked and column not in sql_columns), key=asked.index)
    mapped: dict[str, str] = {}
    for column in sql_columns:
        position = source.index(column)
        if column in target:
            mapped[column] = column
        elif position == 0:
            mapped[column] = target[0]
        else:
            mapped[column] = named.pop(0) if named else target[min(position, len(target) - 1)]
    return [mapped[column] for column in sql_columns]


def adapt(neighbour: Row, row: Row) -> str:
    """The neighbour's SQL with the columns and values of the row's question."""
    selected = SELECT.match(neighbour["sql"])
    if selected is None:
        raise ValueError(f"not a query of this corpus: {neighbour['sql']}")
    aggregate, column = selected.groups()
    conditions = CONDITION.findall(neighbour["sql"])
    column, *columns = map_columns([column, *(name for name, _, _ in conditions)], neighbour, row)
    names, numbers = NAME.findall(row["question"]), NUMBER.findall(row["question"])
    parts = []
    for name, (_, operator, old) in zip(columns, conditions, strict=True):
        if old.startswith("'"):
            value = f"'{names.pop(0)}'" if names else old
        else:
            value = numbers.pop(0) if numbers else old
        parts.append(f"{name} {operator} {value}")
    return f"SELECT {f'{aggregate}({column})' if aggregate else column} FROM data WHERE {' AND '.join(parts)}"


def run_query(database: Path, sql: str) -> list[str] | None:
    """The rows of the result, sorted as text; None if SQLite rejects the query."""
    connection = sqlite3.connect(database)
    try:
        return sorted(map(repr, connection.execute(sql).fetchall()))
    except sqlite3.Error:
        return None
    finally:
        connection.close()


def read_rows(path: Path) -> list[Row]:
    """The rows of a JSON Lines file."""
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def execution_accuracy(data: Path) -> float:
    """Fraction of the questions in eval.jsonl for which the baseline's SQL returns the same rows as the reference."""
    nearest = NearestQuestion(read_rows(data / "train.jsonl"))
    rows = read_rows(data / "eval.jsonl")
    right = 0
    for row in rows:
        database = data / "databases" / f"{row['database']}.sqlite"
        right += run_query(database, adapt(nearest(row["question"]), row)) == run_query(database, row["sql"])
    return right / len(rows)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Execution accuracy of the nearest training question's SQL.")
    parser.add_argument("--data", type=Path, default=FOLDER / "data", help="the corpus (default: data/ here)")
    accuracy = execution_accuracy(parser.parse_args().data)
    print(f"baseline (SQL of the nearest training question): execution accuracy {accuracy:.1%}")


if __name__ == "__main__":
    main()
