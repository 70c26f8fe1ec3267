"""`make model`: a table of rules with what breaks without each, then many scenarios in which nothing may break."""

from __future__ import annotations

import argparse
import sys
import time

from tests.model.explorer import Found, explore
from tests.model.rules import KNOWN, RULES, SMALL, WIDE, Rule
from tests.model.scene import Scenario


def _say(line: str = "") -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _named(scenario: Scenario) -> str:
    """Name a scenario in a few words."""
    faults = f"{scenario.faults} of {','.join(sorted(scenario.kinds))}" if scenario.faults else "no fault"
    words = [faults, *(["client " + ",".join(scenario.client)] if scenario.client else [])]
    return "; ".join([*words, *([] if scenario.scan else ["no scan"]), *(["old runs"] if scenario.old else [])])


def _row(name: str, rule: Rule, found: Found) -> bool:
    """Show what came of leaving a rule out. Gives whether it was expected."""
    good = found.violation == rule.violation
    said = found.violation or "nothing"
    _say(f"{name:24} {said:56} {len(found.trace):>3} steps {found.states:>7} states   {_named(rule.scenario)}")
    if not good:
        _say(f"{'':24} expected: {rule.violation}")
    return good


def _all_on(scenario: Scenario) -> Found:
    found = explore(scenario)
    if found.violation:
        _say(f"ALL ON, {_named(scenario)}: {found.violation}")
        for step in found.trace:
            _say(f"    {step}")
    return found


def _trace(name: str) -> int:
    found = explore(RULES[name].off(name) if name in RULES else KNOWN[name].scenario)
    for number, step in enumerate(found.trace, 1):
        _say(f"{number:>3}  {step}")
    _say(f"     {found.violation or 'nothing is broken'}")
    return 0 if found.violation else 1


def main() -> int:
    """Explore. Gives 1 when anything is not as expected."""
    parser = argparse.ArgumentParser(prog="python -m tests.model", description=__doc__)
    parser.add_argument("--trace", choices=[*RULES, *KNOWN], help="show the shortest way to what breaks without a rule")
    parser.add_argument("--small", action="store_true", help="leave out the wide scenarios")
    given = parser.parse_args()
    if given.trace:
        return _trace(given.trace)
    begun = time.monotonic()
    _say("without each rule:")
    good = [_row(name, rule, explore(rule.off(name))) for name, rule in RULES.items()]
    _say("\nknown, with all of them:")
    good += [_row(name, rule, explore(rule.scenario)) for name, rule in KNOWN.items()]
    scenarios = (*(rule.scenario for rule in RULES.values()), *SMALL, *(() if given.small else WIDE))
    found = [_all_on(scenario) for scenario in dict.fromkeys(scenarios)]
    violations = sum(1 for one in found if one.violation)
    states, seconds = sum(one.states for one in found), time.monotonic() - begun
    _say(f"\nall on: {len(found)} scenarios, {states} states, {violations} violations, {seconds:.0f} s")
    return 0 if all(good) and not violations else 1


if __name__ == "__main__":
    sys.exit(main())
