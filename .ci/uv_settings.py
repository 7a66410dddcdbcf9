"""Prints what uv needs in its environment to find packages where pip, as it is configured here, does: shell exports."""

import shlex
import subprocess
import sys

NAMES = {"index-url": ("UV_DEFAULT_INDEX", " "), "extra-index-url": ("UV_INDEX", " "),
         "find-links": ("UV_FIND_LINKS", ","), "cert": ("SSL_CERT_FILE", " ")}

listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True)
settings = {}
# The environment has the last word.
for line in sorted(listed.stdout.splitlines(), key=lambda line: line.startswith(":env:")):
    name, _, value = line.partition("=")
    settings[name.rpartition(".")[2]] = value.strip().strip("'")
for name, (variable, separator) in NAMES.items():
    if settings.get(name):
        print(f"export {variable}={shlex.quote(separator.join(settings[name].replace(chr(92) + 'n', ' ').split()))}")
print("export UV_INDEX_STRATEGY=unsafe-best-match")  # as pip does: the best of all indexes
