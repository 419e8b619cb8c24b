#!/bin/sh
# Prints the newest Python of ours that PATH really holds; says in one sentence if there is none.
#
# Every folder of PATH is tried for a name, not only the first: a pyenv shim stands in front of
# versions it does not run. The probe imports what `python -m venv` needs, which Debian leaves out.
probe='import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))'

IFS=:
for name in python3.13 python3.12 python3.11 python3; do
  for folder in $PATH; do
    candidate="${folder:-.}/$name"
    if [ -x "$candidate" ] && "$candidate" -c "$probe" >/dev/null 2>&1 </dev/null; then
      printf '%s\n' "$candidate"
      exit 0
    fi
  done
done
echo "crossshard needs Python 3.11 or newer with its venv module (a package of its own on Debian," \
  "python3-venv), and none on PATH runs; install one or say: make PYTHON=/path/to/python" >&2
exit 1
