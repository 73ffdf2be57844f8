"""One attempt of a run: a Ray job that plans, claims generations, runs worker groups and judges how they ended."""
