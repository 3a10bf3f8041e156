r"""Units of an answer: ``12 \text{ cm}``, ``50\%``, ``90^\circ``, ``3 hours``, ``\$5``; the base in ``1011_2`` is one too."""

from __future__ import annotations

import re

_SPELLINGS = {
    "mm": "mm millimeter millimetre",
    "cm": "cm centimeter centimetre",
    "m": "m meter metre",
    "km": "km kilometer kilometre",
    "inch": "in inch inches",
    "foot": "ft foot feet",
    "yard": "yd yard",
    "mile": "mi mile",
    "mg": "mg milligram",
    "g": "g gram",
    "kg": "kg kilogram",
    "pound": "lb lbs pound",
    "ounce": "oz ounce",
    "s": "s sec second",
    "min": "min minute",
    "h": "h hr hrs hour",
    "day": "day",
    "week": "week",
    "month": "month",
    "year": "yr year",
    "ml": "ml milliliter millilitre",
    "l": "l liter litre",
    "cent": "cent ¢",
    "dollar": "dollar usd",
    "euro": "euro eur €",
    "degree": r"degree deg ° ^\circ ^{\circ}",
    "radian": "rad radian",
    "percent": r"percent pct percentage % \%",
    "mph": "mph",
    "kmh": "km/h kph kmh",
    "": "unit",
}
UNITS = {spelling: unit for unit, spellings in _SPELLINGS.items() for spelling in spellings.split()}
_CURRENCIES = {r"\$": "dollar", "$": "dollar", "€": "euro", "£": "pound sterling"}
_MONEY = re.compile(r"\s*(\\\$|[€£]|\$(?![^$]*\$))(?=\s*[\d.])")
_BASE = re.compile(r"(?<=\d)_\{?(\d+)\}?\s*\Z")
_SIGN = re.compile(r"\s*(\\%|%|€|¢|°|\^\s*\\circ|\^\s*\{\s*\\circ\s*\})\s*\Z")
_TEXT = re.compile(
    r"(?:\\[ ,;]|~|\s)*\\(?:text|textnormal|textrm|textbf|textit|mathrm|mbox)\s*\{([^{}]*)\}\s*(\^\s*\{?\s*[23]\s*\}?)?\s*\Z"
)
_WORD = re.compile(
    r"(?<=[\d\s})])\s*((?:(?:square|sq\.?|cubic|cu\.?)\s+)?[A-Za-z/]+\.?)\s*(\^\s*\{?\s*[23]\s*\}?|[²³])?\s*\Z"
)
_POWER = re.compile(r"^(square|sq\.?)\s+|^(cubic|cu\.?)\s+")


def split_unit(answer: str, *, letters: bool = True) -> tuple[str, str | None]:
    r"""An answer without its unit, and the unit; None if it has none, or one that is not known.

    Words in ``\text{}`` are taken off whatever they say, bare words only if they are units. Without ``letters`` a bare
    letter stays: ``5 m`` may be five times m.
    """
    if money := _MONEY.match(answer):
        return answer[money.end() :], _CURRENCIES[money[1]]
    if base := _BASE.search(answer):
        return answer[: base.start()], f"base {base[1]}"
    if sign := _SIGN.search(answer):
        return _cut(answer, sign, UNITS[re.sub(r"\s", "", sign[1])])
    if text := _TEXT.search(answer):
        return _cut(answer, text, _unit(text[1], text[2]))
    if word := _WORD.search(answer):
        unit = _unit(word[1], word[2])
        if unit is not None and (letters or len(word[1]) > 1):
            return _cut(answer, word, unit)
    return answer, None


def _cut(answer: str, found: re.Match[str], unit: str | None) -> tuple[str, str | None]:
    rest = answer[: found.start()].rstrip("\\ ~,")
    return (rest, unit) if rest else (answer, None)


def _unit(name: str, power: str | None) -> str | None:
    """``cm^2`` for ``square centimeters``, ``cm²`` and ``cm^2``; None if it is no unit."""
    name = re.sub(r"\s+", " ", name.replace("\\", "").strip(" .").lower()).replace("²", "^2").replace("³", "^3")
    if word := _POWER.match(name):
        name, power = name[word.end() :], "2" if word[1] else "3"
    if name.endswith(("^2", "^3")):
        name, power = name[:-2].strip(), name[-1]
    unit = UNITS.get(name, UNITS.get(name.removesuffix("s")))
    exponent = re.sub(r"\D", "", (power or "").replace("²", "2").replace("³", "3"))
    return unit and unit + (f"^{exponent}" if exponent else "")
