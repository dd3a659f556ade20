/* commands: the entry points of `sluice`. One file cmd_<name>.c each, one row each in the table of sluice.c.
 * argv[0] is the command's name; the result is the exit code (cli.h has the rules). */
#ifndef SL_TOOLS_COMMANDS_H
#define SL_TOOLS_COMMANDS_H
int sl_cmd_extract(int argc, char **argv);
int sl_cmd_push(int argc, char **argv);
int sl_cmd_monitor(int argc, char **argv);
int sl_cmd_status(int argc, char **argv);
int sl_cmd_drain(int argc, char **argv);
int sl_cmd_check(int argc, char **argv);
int sl_cmd_bench(int argc, char **argv);
int sl_cmd_inspect(int argc, char **argv);
int sl_cmd_tokenize(int argc, char **argv);
int sl_cmd_mask_report(int argc, char **argv);
int sl_cmd_verify(int argc, char **argv);
int sl_cmd_cat(int argc, char **argv);
int sl_cmd_export(int argc, char **argv);
int sl_cmd_salvage(int argc, char **argv);
#endif
