"""Values as strict JSON has them."""

import datetime
import json
from math import inf, nan
from pathlib import Path

from allranks.reporting.plain import as_json


def test_what_json_has_no_word_for_is_its_text() -> None:
    value = {1: (nan, -inf, 1.5), "day": datetime.date(2024, 1, 2), "path": Path("a/b"), "rest": [True, None, "x", 3]}
    plain = as_json(value)
    assert json.loads(json.dumps(plain, allow_nan=False)) == {
        "1": ["nan", "-inf", 1.5],
        "day": "2024-01-02",
        "path": "a/b",
        "rest": [True, None, "x", 3],
    }
