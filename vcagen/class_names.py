import json
from pathlib import Path


def read_class_names(path: Path) -> tuple[str, ...]:
    """Names in label order from a JSON list or a text file with a name a line; a `ValueError` for anything else."""
    try:
        text = path.read_text(encoding="utf-8-sig")  # editors of Windows put a mark before the first name
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read ({error}); expected class names") from error
    try:
        names = json.loads(text)
    except json.JSONDecodeError:
        names = text.rstrip().splitlines()
    if isinstance(names, list):
        names = [name.strip() if isinstance(name, str) else name for name in names]
        if "" in names:
            raise ValueError(f"{path}: name {names.index('') + 1} is empty; every class needs one")
    if not isinstance(names, list) or not names or not all(isinstance(name, str) and name for name in names):
        raise ValueError(f"{path}: expected a JSON list of class names, or one name a line")
    return tuple(names)
