"""The generated tasks by name. Each makes one problem of at most n tokens: context, questions, answers. It returns a
Tape, a pair of arrays (tokens, flags), or None if n is too small. Words, numbers, places and texts are random."""
from chains import variables
from counts import common_words, counting, frequent_words
from needles import json, keyed, needles, passkey, uuids_to_uuids, words_to_numbers

TASKS = dict(passkey=passkey, needles=needles, keyed=keyed, mk2=words_to_numbers, mk3=uuids_to_uuids, json=json,
             vt=variables, cwe=common_words, fwe=frequent_words, count=counting)
