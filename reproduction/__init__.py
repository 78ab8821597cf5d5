"""The reproduction as a folder: so that its tests have names of their own beside the library's."""
