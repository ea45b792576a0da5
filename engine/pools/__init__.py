"""Where members come from: built-in models, folders, hubs, recipes; and how a pool is loaded."""
