"""What the fleet is: hardware of a machine, registry of workers. It knows neither tasks nor pipelines."""
