import subprocess
import sys

CASES = [
    ("The cat. the dog, a cat", "2", "2 cat\n2 the\n"),
    ("b a b a c", "3", "2 a\n2 b\n1 c\n"),
    ("One-two_two3THREE\n\n", "5", "2 two\n1 one\n1 three\n"),
    ("x " * 300 + "y " * 40, "1", "300 x\n"),
    ("", "4", ""),
]
for text, number, expected in CASES:
    done = subprocess.run(
        ["/app/topwords.sh", number], input=text, capture_output=True, text=True, timeout=20, cwd="/"
    )
    if done.stdout != expected:
        sys.exit(f"for {text[:40]!r} it printed {done.stdout!r}, and {expected!r} is right. {done.stderr}")
