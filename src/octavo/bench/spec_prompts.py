"""Texts for `octavo bench spec`: work whose answer repeats what was read, and work whose answer is new."""

from __future__ import annotations

from dataclasses import dataclass

_LETTER = """Dear members of the Hillside Garden Club,

Thank you for coming to the spring meeting on the twelfth of March. We were forty-one people in the old school hall, more than in any year since the club was founded, and the
discussion went on until the caretaker came to lock the doors. This letter says what was decided, so that those who could not come know what to expect.

First, the greenhouse. The roof was damaged in the January storm, and eleven panes of glass are broken. Mr. Aldous has offered to repair them at cost, which is two hundred and
forty pounds including the putty. The meeting agreed to pay this from the reserve. Until the work is done nobody should walk under the north side, because loose glass may fall.
The work will begin on the second of April and should take three days.

Second, the seed exchange. It will be held on the nineteenth of April, from ten in the morning until noon, in the same hall. Please bring your seeds in labelled envelopes, with
the name of the plant, the year in which the seed was collected, and your own name. Beans, peas and tomatoes were in great demand last year. If you have rare varieties, please
write to Mrs. Okafor before the tenth, so that she can make the list.

Third, the summer visit. Most members preferred the botanical garden in Leeds to the rose garden in York. The coach will leave from the church at eight in the morning on the
seventh of June and return at about six in the evening. The fare is fourteen pounds for adults and seven pounds for children. Please pay Mr. Lindqvist by the end of May.

With best wishes for the growing season,

Harriet Vale, secretary
"""

_RECORDS = """Orders of Tuesday. Order 1041: Maria Jensen from Aarhus ordered three oak chairs for 285 euros, to be delivered on 14 May. Order 1042: Tom Okoro from Leeds ordered one walnut
table for 640 euros, to be delivered on 16 May. Order 1043: Aiko Tanaka from Osaka ordered two ash benches for 310 euros, to be delivered on 21 May. Order 1044: Luis Ferreira from
Porto ordered five pine shelves for 175 euros, to be delivered on 14 May. Order 1045: Nora Lind from Malmo ordered one oak desk for 520 euros, to be delivered on 18 May. Order 1046:
Peter Novak from Brno ordered four beech stools for 196 euros, to be delivered on 23 May."""

_EXAMPLE = """[{"order": 1041, "name": "Maria Jensen", "city": "Aarhus", "number": "three", "item": "oak chairs", "euros": 285, "date": "14 May"},
 {"order": 1042, "name": "Tom Okoro", "city": "Leeds", "number": "one", "item": "walnut table", "euros": 640, "date": "16 May"},
"""


@dataclass(frozen=True, slots=True)
class Work:
    """``copies``: the answer is made of pieces of the prompt. ``prompts`` are plain text, to be continued."""

    name: str
    copies: bool
    prompts: tuple[str, ...]


def _edit(old: str, new: str) -> str:
    begin = _LETTER.replace(old, new)[:60]
    return f"Here is a letter:\n\n{_LETTER}\nThe same letter, with {old} replaced by {new}:\n\n{begin}"


WORKS = (
    Work(
        "edit",
        True,
        tuple(_edit(old, new) for old, new in (("Hillside", "Riverside"), ("March", "April"), ("greenhouse", "glasshouse"), ("Leeds", "Bristol"))),
    ),
    Work(
        "json",
        True,
        (
            f"Text: {_RECORDS}\n\nThe same orders as JSON:\n{_EXAMPLE}",
            f"{_RECORDS}\n\nAll orders as a JSON list:\n\n{_EXAMPLE}",
            f"Extract the orders as JSON.\n\n{_RECORDS}\n\n{_EXAMPLE}",
            f"Input: {_RECORDS}\nOutput: {_EXAMPLE}",
        ),
    ),
    Work(
        "stories",
        False,
        (
            "Once upon a time, in a village at the edge of the sea, there lived a girl who",
            "The train was late again, and Martin, who had been waiting on the platform since six,",
            "Nobody in the house had opened the green door for thirty years. When at last",
            "It was the last night of the fair, and the old magician",
        ),
    ),
    Work(
        "facts",
        False,
        (
            "Photosynthesis is the process by which plants",
            "The main causes of the First World War were",
            "To understand how a refrigerator works, one has to know that",
            "The human heart has four chambers. The",
        ),
    ),
    Work(
        "code",
        False,
        (
            "def quicksort(values):\n    ",
            'class Stack:\n    """A stack of integers."""\n\n    def __init__(self):\n',
            "import csv\n\ndef read_prices(path):\n",
            "// Returns the greatest common divisor of a and b.\nint gcd(int a, int b) {\n",
        ),
    ),
)
