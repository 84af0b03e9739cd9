import subprocess
import sys
import tempfile
from pathlib import Path

NAMES = [
    "a.txt",
    "two words.txt",
    "-n.txt",
    "--help.txt",
    "*.txt",
    "line\nbreak.txt",
    "$HOME.txt",
    ".hidden.txt",
    "q'uo\"te.txt",
]
OTHERS = ["atxt", "note.txt.bak", "readme.md"]


def archived(source, target, cwd):
    done = subprocess.run(
        ["/app/archive.sh", source, target], capture_output=True, text=True, timeout=20, cwd=cwd
    )
    print(done)
    return done.stdout.strip()


with tempfile.TemporaryDirectory() as place:
    source, target = Path(place, "-from here"), Path(place, "-to/the place")
    source.mkdir()
    if archived(str(source), str(target), place) != "0":
        sys.exit("an empty folder has 0 files")
    (source / "folder.txt").mkdir()
    for name in [*NAMES, *OTHERS]:
        (source / name).write_text(name)
    # Names that begin with a dash also as the arguments themselves.
    for given in (str(source), str(target)), (source.name, str(target.relative_to(place))):
        if archived(*given, place) != str(len(NAMES)):
            sys.exit("the number is wrong")
        found = {path.name: path.read_text() for path in target.iterdir()}
        if found != {name: name for name in NAMES}:
            sys.exit(f"found {sorted(found)}")
