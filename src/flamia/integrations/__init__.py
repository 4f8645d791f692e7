"""At home in training stacks: each module here needs the library that it is named after, and is imported by name only."""
