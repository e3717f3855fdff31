"""The work of each kind of variant; parallel modules: eager, static, session, served."""
