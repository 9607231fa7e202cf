"""Waits as torch's builder of extensions does while the file is there. usage: states_file_baton.py PATH"""

import os
import sys
import time


def wait(path):
    while os.path.exists(path):
        time.sleep(0.1)


print("builds an extension", flush=True)
wait(sys.argv[1])
print("has found it built", flush=True)
time.sleep(1000)
