"""Jobs in a queue of Kueue: its names, and how many workers a job asks it for."""
