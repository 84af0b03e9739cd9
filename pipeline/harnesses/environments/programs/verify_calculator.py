"""Verifier: reads {"answer", "expected", "uses"} as JSON on stdin, prints {"reward": 1.0} or {"reward": 0.0}.

The answer is right when it is the expected integer (thousands commas and a final full stop are forgiven) and at least
one call of the calculator ran.
"""

import json
import sys


def reward(answer: str, expected: str, uses: list[dict[str, object]]) -> float:
    right = answer.strip().removesuffix(".").replace(",", "") == expected
    used = any(use["name"] == "calculator" and use["ok"] for use in uses)
    return 1.0 if right and used else 0.0


if __name__ == "__main__":
    given = json.load(sys.stdin)
    print(json.dumps({"reward": reward(given["answer"], given["expected"], given["uses"])}))
