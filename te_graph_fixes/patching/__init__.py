"""Python text: find a shape in it by syntax, edit it, and put what it becomes in the place of code that runs."""
