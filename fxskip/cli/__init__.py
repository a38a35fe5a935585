"""Rewire Mixture-of-Experts language models so that their communication hides under compute.

\b
From an original to a distilled model:
  fxskip plan    models/original farskip
  fxskip convert models/original farskip models/rewired
  fxskip distill models/rewired --teacher models/original --data train.txt --out runs/first
  fxskip eval    runs/first/model --teacher models/original --data held-out.txt
  fxskip doctor  runs/first/model

What a command reports goes to stdout, as text or with --json as one JSON value; everything else goes to stderr.

\b
Exit codes:
  0    done, and what was examined is fine
  1    what was examined is not intact (doctor), or a bound was missed (eval)
  2    the command line, a spec, a recipe or a data file is wrong
  3    the model cannot be captured, or not be rewired like that
  4    a folder or file is damaged, in the way, or cannot be read or written
  70   a defect of fxskip; the traceback is shown
  130  interrupted
"""

# The text above is also that of `fxskip --help`. The commands import what they need when they run; that Python
# imports the package `fxskip` first, and torch with it, costs every call some seconds all the same.

from fxskip.cli.app import main

__all__ = ["main"]
