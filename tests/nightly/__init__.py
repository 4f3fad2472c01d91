"""What takes longer than a change should wait: `make nightly`, or some steps of it by name.

- `steps`: what is run, what it needs of the machine, and which paths it tests;
- `results`: what became of a step, and for how long that counts;
- `night`: runs steps, those that measure nothing side by side;
- `repeat`: runs one command again and again with new seeds.
"""
