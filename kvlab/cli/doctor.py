"""`kvlab doctor`: what this machine has and lacks (`kvlab.doctor`)."""

import argparse

from kvlab.cli.grammar import command


def add(commands) -> None:
    """Enter the command."""
    made = command(commands, "doctor", _doctor, "say what this machine has and lacks, and whether the labs will run")
    made.add_argument("--line", action="store_true", help="only the verdict, in one line")


def _doctor(arguments: argparse.Namespace) -> int:
    from kvlab import doctor

    findings = doctor.examine()
    print(doctor.report(findings, line=arguments.line))
    return 0 if doctor.labs_will_run(findings) else 1
