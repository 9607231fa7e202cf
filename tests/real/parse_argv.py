"""Runs in an engine's own environment: what does its own parser say to these command lines?

usage: parse_argv.py vllm|sglang
One JSON list of words a line comes in; one {"accepted": bool, "message": str, "parsed": {…}} a line goes out.
"""

import argparse
import contextlib
import io
import json
import sys


def vllm_parser():
    try:
        from vllm.utils.argparse_utils import FlexibleArgumentParser
    except ImportError:  # before 0.12
        from vllm.utils import FlexibleArgumentParser
    try:
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
    except ImportError:  # before 0.3x
        from vllm.entrypoints.openai.cli_args import make_arg_parser
    return make_arg_parser(FlexibleArgumentParser(prog="vllm serve"))


def sglang_parser():
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser(prog="sglang serve")
    ServerArgs.add_cli_args(parser)
    return parser


def ask(parser, words):
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        try:
            parsed = vars(parser.parse_args(words))
        except SystemExit:
            return {"accepted": False, "message": said.getvalue(), "parsed": {}}
    plain = {name: value for name, value in parsed.items() if isinstance(value, (bool, int, str, type(None)))}
    return {"accepted": True, "message": said.getvalue(), "parsed": plain}


def main():
    with contextlib.redirect_stdout(sys.stderr):  # engines print while they are imported
        parser = {"vllm": vllm_parser, "sglang": sglang_parser}[sys.argv[1]]()
    for line in sys.stdin:
        with contextlib.redirect_stdout(sys.stderr):
            answer = ask(parser, json.loads(line))
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
