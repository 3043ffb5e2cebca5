def draw_run(folder): return folder
