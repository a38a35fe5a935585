"""Try to load saved models where fxskip is not installed.

    python -m tests.checkpoint.without_fxskip FOLDER...

The last line that it prints is a JSON object: for each folder and each way to load it, what came of it.
"""

import json
import sys

import transformers

WAYS = {
    "AutoConfig": {},
    "AutoModel": {},
    "AutoModelForCausalLM": {},
    "AutoModelForCausalLM, trusting": {"trust_remote_code": True},
    "AutoModel, trusting": {"trust_remote_code": True},
    "MixtralConfig": {},
    "MixtralModel": {},
    "MixtralForCausalLM": {},
    "MixtralForSequenceClassification": {},
}


class NotInstalled:
    """Stands first among the finders of modules, and says what Python says of a package that is not there."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "fxskip":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def outcome(way, folder):
    try:
        loaded = getattr(transformers, way.partition(",")[0]).from_pretrained(folder, **WAYS[way])
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return f"loaded {type(loaded).__name__}"


if __name__ == "__main__":
    sys.meta_path.insert(0, NotInstalled())
    found = {folder: {way: outcome(way, folder) for way in WAYS} for folder in sys.argv[1:]}
    print(f"\n{json.dumps(found)}")  # transformers asks on stdout whether to trust the code, and ends no line
