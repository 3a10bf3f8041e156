"""Tools that come with the package, one file each; `sandbox` runs the programs of one of them."""
