import sys

FOUND = sys.argv[1:]
sys.argv.append("added")
