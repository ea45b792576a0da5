"""What a target is asked to write prompts about, by category.

A prompt is drawn in three steps: a category by weight, an opening from the category's parts, and
the rest of the user's turn from the target itself. Every opening was written for this project.
"""

from __future__ import annotations

import dataclasses
import random


@dataclasses.dataclass(frozen=True)
class Topic:
    """One kind of prompt.

    Attributes:
        name: Category, as it is reported.
        weight: Share of the prompts, relative to the other topics.
        system: The system turn under which the target writes the user's turn.
        openings: Templates of the opened user turn; ``{part}`` is drawn from ``parts``.
        parts: What the templates' fields are drawn from.
        stop: Text that ends the user's turn, kept in it; empty waits for the end of the turn.
        max_prompt_tokens: Longest user turn the target may write.
    """

    name: str
    weight: float
    system: str
    openings: tuple[str, ...]
    parts: dict[str, tuple[str, ...]]
    stop: str = ""
    max_prompt_tokens: int = 160

    def longest_openings(self) -> list[str]:
        """Every template with its longest parts."""
        longest = {name: max(choices, key=len) for name, choices in self.parts.items()}
        texts = []
        for text in self.openings:
            for name, choice in longest.items():
                text = text.replace(f"{{{name}}}", choice)
            texts.append(text)
        return texts

    def open(self, rng: random.Random) -> str:
        """An opened user turn."""
        text = rng.choice(self.openings)
        for name, choices in self.parts.items():
            while f"{{{name}}}" in text:
                text = text.replace(f"{{{name}}}", rng.choice(choices), 1)
        return text


def words(text: str) -> tuple[str, ...]:
    """The words of a text; underscores stand for spaces."""
    return tuple(word.replace("_", " ") for word in text.split())


NAMES = words(
    "Nora Ben Carla Omar Lucy Tom Priya Jack Elena Sam Mia Leo Anna David Zoe Peter Ivy Hassan "
    "Ruth "
    "Kim Tara Paul Gina Frank Lily Oscar Dana Victor Wendy Max Rosa Henry Clara Amir Julia Eric "
    "Maya Simon Beth Karl Fiona Greg Hana Ian Jade Luis Mark Nina Olga Sara John Mary James Alice"
)
THINGS = words(
    "apples books pencils cookies marbles stickers tickets cups_of_flour eggs bottles_of_water "
    "chairs boxes trees flowers cards coins pages miles hours shirts toys candies oranges balloons "
    "sandwiches fish chickens cars bricks bags_of_rice pizzas slices dollars stamps shells buttons"
)
PLACES = words(
    "school bakery farm library shop zoo restaurant factory garden market museum cinema hotel "
    "theater gym hospital camp stadium office pool bookstore supermarket train bus classroom"
)
NOUNS = words(
    "list string number array word character digit element matrix dictionary value sum index file "
    "pair vowel prime path tuple range sequence sentence date interval node price name score item "
    "letter duplicate palindrome bracket median maximum minimum average difference product "
    "substring"
)
VERBS = words(
    "count find remove sort check get filter reverse merge split convert replace is has sum add "
    "multiply encode decode make rotate flatten compute compare select swap validate format parse "
    "separate insert compress group calculate max min unique shift"
)
ARGUMENTS = (
    "numbers: List[int]", "text: str", "n: int", "s: str", "arr: list", "lst", "a: int, b: int",
    "x: int, y: int", "strings: List[str]", "values: List[float]", "nums: list[int], k: int",
    "string: str, sub: str", "words: List[str]", "arr", "n", "text", "d: dict", "a, b",
    "matrix: List[List[int]]", "lst: list, n: int", "s: str, n: int", "number",
    "l1: list, l2: list",
)  # fmt: skip
RETURNS = (
    " -> int", " -> bool", " -> str", " -> List[int]", " -> list", " -> float", "", "",
    " -> List[str]", " -> Tuple[int, int]", " -> dict",
)  # fmt: skip
IMPORTS = (
    "", "", "", "from typing import List\n\n\n", "\n", "from typing import List, Tuple\n\n\n",
    "import math\n\n\n", "from typing import List, Optional\n\n\n",
)  # fmt: skip
SUBJECTS = words(
    "history space cooking music animals football the_ocean computers health money travel plants "
    "weather movies books school languages physics cars art sleep dogs cats coffee chemistry law "
    "politics gardening biology photography mountains climate the_brain rivers the_economy "
    "religion "
    "friendship exercise nutrition poetry cities children jobs math fashion television geography"
)

CODE = Topic(
    name="code",
    weight=0.30,
    system=(
        "The user sends the beginning of a Python function: its signature and a docstring that "
        "says what it returns, with two or three examples that start with >>>."
    ),
    openings=(
        '{imports}def {verb}_{noun}({arguments}){returns}:\n    """ ',
        '{imports}def {verb}_{noun}({arguments}){returns}:\n    """\n    ',
        '{imports}def {verb}_{noun}s({arguments}){returns}:\n    """ Return ',
        "{imports}def {verb}_{noun}_{noun}({arguments}){returns}:\n    \"\"\"{start} ",
        "\ndef {verb}_{noun}({arguments}):\n    '''\n    {start} ",
        '\ndef {noun}_{noun}({arguments}):\n    """{start} ',
    ),
    parts={
        "imports": IMPORTS, "verb": VERBS, "noun": NOUNS, "arguments": ARGUMENTS,
        "returns": RETURNS,
        "start": (
            "Write a function that", "Given a", "Return", "Check if", "You are given", "Create a",
            "This function takes", "Find the", "For a given", "Returns the", "Implement a",
            "Given two", "Your task is to", "Calculate", "In this task, you", "It must be",
        ),
    },
    stop='"""|\'\'\'',
    max_prompt_tokens=200,
)  # fmt: skip

CODE_CHAT = Topic(
    name="code",
    weight=0.06,
    system="The user asks a programmer for a short piece of code, in one or two sentences.",
    openings=(
        "Write a {language} function that {verb}s", "Write a {language} program to {verb}",
        "How do I {verb} a {noun} in {language}", "Write {language} code that",
        "Complete this Python function:\n\ndef {verb}_{noun}(", "Implement a {language} class for",
        "Explain what this {language} code does:\n", "Write a SQL query that",
        "Fix the bug in this {language} function:\n\n",
    ),
    parts={
        "language": words("Python Python Python JavaScript C++ Java HTML SQL Rust Go"),
        "verb": VERBS,
        "noun": NOUNS,
    },
)  # fmt: skip

MATH = Topic(
    name="math",
    weight=0.22,
    system=(
        "The user sends a word problem for grade school: a short story with numbers about people, "
        "things and prices. It needs two to five steps of arithmetic and ends with a question."
    ),
    openings=(
        "{name} has {number} {thing}. ", "{name} has", "{name} buys {number} {thing} for",
        "A {place} sells", "There are {number} {thing} in a {place}. ", "{name} and {name} ",
        "Every day, {name} ", "{name} is {number} years old. ", "A {place} has {number} ",
        "{name} bought {number} {thing} and", "In a {place}, there are", "{name} wants to",
        "{name} earns ${number}", "{name} runs", "If {name} ", "It takes {name} {number} ",
        "{name}'s {place} ", "The price of", "A box of {thing} costs ${number}",
        "{name} spends {number} hours", "{number} people", "A car travels", "Half of the {thing}",
        "{name} baked {number}", "At the {place}, {name}", "{name} made", "Each of the {number} ",
    ),
    parts={
        "name": NAMES, "thing": THINGS, "place": PLACES,
        "number": words("2 3 4 5 6 7 8 9 10 12 15 16 18 20 24 25 30 36 40 45 48 50 60 75 80 100"),
    },
    max_prompt_tokens=130,
)  # fmt: skip

QA = Topic(
    name="qa",
    weight=0.22,
    system=(
        "The user types a short question of general knowledge into a search engine: about people, "
        "places, dates, songs, films, sports, science or history."
    ),
    openings=(
        "who {who}", "when {when}", "where {where}", "what {what}", "how many {subject}",
        "who {who} the", "when {when} the", "where {where} the", "what is the {subject}", "which",
        "what {what} the", "how", "name the", "in which", "Who {who}", "When {when}",
        "Where {where}",
        "What {what}", "Which", "How many", "what year", "who is the", "where is", "the",
        "what does the", "how long", "what is the meaning of", "who plays", "who sings",
    ),
    parts={
        "who": words("is was wrote sang won plays played invented discovered has said made owns"),
        "when": words("did was is does were will"),
        "where": words("is was did does are do were"),
        "what": words("is was are does did year country state city kind_of type_of"),
        "subject": SUBJECTS,
    },
    stop="?",
    max_prompt_tokens=40,
)  # fmt: skip

EXTRACT = Topic(
    name="extract",
    weight=0.20,
    system=(
        "The user gives a short text, a table or some records, and asks to extract pieces of it, "
        "to count, compare or classify them, or to put them into a format such as JSON or CSV."
    ),
    openings=(
        "From the text below, list every {field}.\n\n", "Extract the {field} and the {field} from",
        "Read the following paragraph about {subject} and answer the questions below.\n\n",
        "Convert the following records to JSON with the keys \"{field}\" and \"{field}\":\n\n",
        "Extract all {field}s from the text and sort them",
        "Given the following table of {subject}",
        "Given these reviews of a {place}, rate each of them from 1 to 5",
        "Which {field} in the text",
        "Identify the {field}s in the following article about {subject}", "Copy the {field} of",
        "Put the following list of {thing} in alphabetical order: ",
        "Given this data about {subject}",
        "Here is an e-mail from {name}. Write down the {field} and the {field}.\n\n",
        "Find the {field} and the {field} in each sentence, one per line:\n1. {name} ",
        "Count how often each {field} occurs in the text below, as a JSON object",
        "Read the text about {name}'s {place} and name the {field}, the {field} "
        "and the {field}:\n\n",
        "Make a table with the columns {field}, {field} and {field} out of this:\n\n",
    ),
    parts={
        "field": words(
            "name date price city author title year person company country place phone_number "
            "number product color amount email_address age job quantity event topic language "
            "director time organization street score team winner verb noun"
        ),
        "subject": SUBJECTS, "place": PLACES, "thing": THINGS, "name": NAMES,
    },
    max_prompt_tokens=260,
)  # fmt: skip

CHAT = Topic(
    name="chat",
    weight=0.14,
    system="The user asks an assistant for advice, an explanation or a piece of writing.",
    openings=(
        "Write an e-mail", "How can I", "Explain", "What are the", "Give me some tips on {subject}",
        "Write a short story about", "Why do", "Can you help me", "Please rewrite",
        "I want to learn",
        "Compare", "Describe", "Write a poem about {subject}", "What is the difference between",
        "Summarize the following text about {subject}:\n\n", "Imagine you are", "Should I",
        "Tell me",
        "Translate the following sentence to English: ", "Plan a", "Suggest",
        "Write a blog post about",
        "Discuss", "Pretend to be", "I have a problem with", "What would happen if", "Hi! ",
    ),
    parts={"subject": SUBJECTS},
    max_prompt_tokens=140,
)  # fmt: skip

TOPICS = (CODE, CODE_CHAT, MATH, QA, EXTRACT, CHAT)
