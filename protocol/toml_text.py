"""TOML as users write it: measured before it is parsed, and whatever is wrong with it said in one line.

Python's parser takes memory that grows with the square of a key's parts, and a level of the stack for every bracket:
200 kB of dotted keys took it 21 GB. So a text is bounded in bytes, and in how deep it nests, before it is read: with
`wire.DEPTH_LIMIT`, as everything is that comes from peers. What stands in texts and comments nests nothing; where the
lines below and the parser differ about where a text ends, the parser refuses it there.

Source: TOML 1.0.0.
"""

from __future__ import annotations

import re
import tomllib
from typing import Any

from shoal.protocol.errors import ConfigError
from shoal.protocol.wire import DEPTH_LIMIT

_TOKEN = re.compile(
    r'''(?P<text> """(?: [^"\\] | \\. | "(?!"") )*"{3,5}
                | \'\'\'(?: [^'] | '(?!\'\') )*'{3,5}
                | "(?: [^"\\\n] | \\. )*"
                | '[^'\n]*'
                | [A-Za-z0-9_+-]+ | [ \t]+ )
      | (?P<comment> \#[^\n]* )
      | (?P<other> . )''',
    re.DOTALL | re.VERBOSE,
)


def parse_toml(text: str, *, source: str, limit_bytes: int) -> dict[str, Any]:
    """The tables that `text` describes; `source` names it in errors.

    Raises ConfigError, one line, for a text that is too long, nested too deep, or no TOML.
    """
    if len(text.encode(errors="surrogatepass")) > limit_bytes:
        raise ConfigError(f"{source} is larger than {limit_bytes} bytes; shorten it")
    if not _is_shallow(text):
        raise ConfigError(f"{source}: nested deeper than {DEPTH_LIMIT} tables or lists; shorten its keys")
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{source}: not valid TOML: {error}; correct it there") from None
    except ValueError:  # of int(), for more digits than Python reads
        raise ConfigError(f"{source}: not valid TOML: a number has too many digits; correct it there") from None


def _is_shallow(text: str) -> bool:
    """True if no more than DEPTH_LIMIT brackets are open at once, and no key has more parts."""
    open_brackets = parts = 0
    for token in _TOKEN.finditer(text):
        sign = token["other"]
        if sign == ".":
            parts += 1
        elif sign is not None:
            parts = 0
            open_brackets = max(0, open_brackets + (sign in "[{") - (sign in "]}"))
        if parts >= DEPTH_LIMIT or open_brackets > DEPTH_LIMIT:
            return False
    return True
