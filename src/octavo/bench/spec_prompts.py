"""Texts for `octavo bench spec`: work whose answer repeats what was read, and work whose answer is new."""

from __future__ import annotations

from dataclasses import dataclass

_LETTER = """Dear members of the Hillside Garden Club,

Thank you for coming to the spring meeting on the twelfth of March. We were forty-one people in the old school hall, more than
in any year since the club was founded, and the discussion went on until the caretaker came to lock the doors. This letter says
what was decided, so that those who could not come know what to expect.

First, the greenhouse. The roof was damaged in the January storm, and eleven panes of glass are broken. Mr. Aldous has offered
to repair them at cost, which is two hundred and forty pounds including the putty. The meeting agreed to pay this from the
reserve. Until the work is done nobody should walk under the north side, because loose glass may fall. The work will begin on
the second of April and should take three days.

Second, the seed exchange. It will be held on the nineteenth of April, from ten in the morning until noon, in the same hall.
Please bring your seeds in labelled envelopes, with the name of the plant, the year in which the seed was collected, and your
own name. Beans, peas and tomatoes were in great demand last year. If you have rare varieties, please write to Mrs. Okafor
before the tenth, so that she can make the list.

Third, the summer visit. Most members preferred the botanical garden in Leeds to the rose garden in York. The coach will leave
from the church at eight in the morning on the seventh of June and return at about six in the evening. The fare is fourteen
pounds for adults and seven pounds for children. Please pay Mr. Lindqvist by the end of May.

With best wishes for the growing season,

Harriet Vale, secretary
"""

_REVIEWS = """Guest book of the Harbour Inn.

Maria Jensen, 14 May: The room was small but very clean, and from the window we could see the fishing boats come in every
morning. Breakfast was served on the terrace.
Tom Okoro, 16 May: The lift was out of order for two days, so we carried our bags up four floors. The staff were kind and gave
us a free dinner on the last evening.
Aiko Tanaka, 21 May: A quiet house with a good library. The bread is baked in the village and still warm at seven. I will come
back in the autumn with my sister.
Luis Ferreira, 23 May: We had asked for a room to the garden and got one to the street, where the buses begin at five. The owner
changed it the next day and said he was sorry.
Nora Lind, 30 May: The best fish soup on the coast, and the stairs to the beach are only a minute away. Bring a warm coat,
because the wind is strong even in summer.
"""

_EXAMPLE = (
    '[\n  {"guest": "Maria Jensen", "date": "14 May", "text": "The room was small but very clean, and from the window we could see the '
    'fishing boats come in every morning. Breakfast was served on the terrace."},\n'
    '  {"guest": "Tom Okoro", "date": "16 May", "text": "The lift'
)


@dataclass(frozen=True, slots=True)
class Work:
    """``copies``: the answer is made of pieces of the prompt. ``prompts`` are plain text, to be continued."""

    name: str
    copies: bool
    prompts: tuple[str, ...]


def _edit(old: str, new: str) -> str:
    edited = _LETTER.replace(old, new)
    begin = edited[: edited.index("Thank you for coming")]
    task = f"The same letter, with {old} replaced by {new}, and nothing else changed:"
    return f"Here is a letter:\n\n{_LETTER}\n{task}\n\n{begin}Thank you for coming"


_REPLACED = (("Hillside", "Riverside"), ("March", "April"), ("greenhouse", "glasshouse"), ("Leeds", "Bristol"))
_FRAMES = (("", "As JSON:\n\n"), ("Text:\n\n", "JSON:\n\n"), ("Input: ", "Output: "), ("", "The guest book as a JSON list:\n\n"))
WORKS = (
    Work(
        "edit",
        True,
        tuple(_edit(*words) for words in _REPLACED),
    ),
    Work(
        "json",
        True,
        tuple(
            f"{before}{_REVIEWS}\n\n{behind}{_EXAMPLE}"
            for before, behind in _FRAMES
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
