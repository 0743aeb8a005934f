"""Does all its work behind the usual guard, in functions, and ends itself at once."""

import argparse
import os


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("words", nargs="*")
    parser.add_argument("--local-rank", type=int, default=int(os.environ.get("LOCAL_RANK", -1)))
    print(parser.parse_args())
    os.write(1, b"ends\n")
    os._exit(4)


if __name__ == "__main__":
    main()
