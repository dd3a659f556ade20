/* crash: named points at which a test can kill the process (SIGKILL to itself). boot.crash_points is a list
 * "gather.after_publish:3,writer.before_commit:1": the process dies the n-th time it passes the point, once in the life
 * of the store (a file `<store>/.crash/<name>` records that it fired). Without the list a point costs one branch. */
#ifndef SL_IPC_CRASH_H
#define SL_IPC_CRASH_H
struct sl_boot;
void sl_crash_init(const struct sl_boot *b, const char *role);
void sl_crash_point(const char *name);
#endif
