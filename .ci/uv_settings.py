"""Prints shell exports that make uv use the same package indexes as pip on this machine."""

import shlex
import subprocess
import sys

NAMES = {"index-url": ("UV_DEFAULT_INDEX", " "), "extra-index-url": ("UV_INDEX", " "),
         "find-links": ("UV_FIND_LINKS", ","), "cert": ("SSL_CERT_FILE", " ")}

listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True)
settings = {}
# Environment variables override configuration files.
for line in sorted(listed.stdout.splitlines(), key=lambda line: line.startswith(":env:")):
    name, _, value = line.partition("=")
    settings[name.rpartition(".")[2]] = value.strip().strip("'")
for name, (variable, separator) in NAMES.items():
    if settings.get(name):
        print(f"export {variable}={shlex.quote(separator.join(settings[name].replace(chr(92) + 'n', ' ').split()))}")
print("export UV_INDEX_STRATEGY=unsafe-best-match")  # pip also takes the best version of all indexes
