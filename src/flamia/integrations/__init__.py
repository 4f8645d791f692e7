"""At home in training stacks. A module named after a library needs that library; none is imported unless it is named."""
