package agent

import (
	"os"
	"reflect"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

func TestLookup(t *testing.T) {
	a := testAccounts(t)
	id, err := a.Lookup("alice")
	if err != nil || id.Name != "alice" || id.Shell != "/bin/sh" || !reflect.DeepEqual(id.Groups, []uint32{50, 29}) {
		t.Errorf("%+v %v", id, err)
	}
	for _, bad := range []string{"mallory", ":", "alice:", ":staff", "-1", "+5", "4294967295", "4294967296", "a\x00b", strings.Repeat("9", 300), "alice:x:y", " alice"} {
		id, err := a.Lookup(bad)
		if err == nil {
			t.Errorf("%q: %+v", bad, id)
			continue
		}
		wantKind(t, err, ErrBadUser)
	}
	// Without the files, root and numeric ids still work.
	none := Accounts{Passwd: "/nowhere/passwd", Group: "/nowhere/group"}
	for spec, want := range map[string]Identity{
		"":      {Name: "root", Home: "/root", Shell: "/bin/sh"},
		"0":     {Name: "root", Home: "/root", Shell: "/bin/sh"},
		"7:8":   {UID: 7, GID: 8, Home: "/"},
		"7":     {UID: 7, Home: "/"},
		"root:": {},
	} {
		id, err := none.Lookup(spec)
		if (err != nil) != strings.HasSuffix(spec, ":") || err == nil && !reflect.DeepEqual(id, want) {
			t.Errorf("%q: %+v %v", spec, id, err)
		}
	}
	if gid, err := none.LookupGroup("root"); gid != 0 || err != nil {
		t.Error(gid, err)
	}
	// A user whose name is a number is found by that name.
	dir := t.TempDir()
	digits := Accounts{Passwd: writeTestFile(t, dir+"/p", "a:x:42:1::/:\n42:x:43:2::/:\n", 0o600)}
	if id, err := digits.Lookup("42"); err != nil || id.UID != 43 {
		t.Errorf("%+v %v", id, err)
	}
	// Neither a FIFO nor a huge file in their place stops the agent.
	if err := unix.Mkfifo(dir+"/fifo", 0o600); err != nil {
		t.Fatal(err)
	}
	writeTestFile(t, dir+"/huge", strings.Repeat("x", maxAccountFile+1), 0o600)
	for _, f := range []string{dir + "/fifo", dir + "/huge", dir} {
		if id, err := (Accounts{Passwd: f, Group: f}).Lookup("7"); err != nil || id.UID != 7 {
			t.Errorf("%s: %+v %v", f, id, err)
		}
	}
}

func TestReadFileOfProc(t *testing.T) {
	b, err := readFile("/proc/self/maps", 1<<20)
	if err != nil || len(b) == 0 {
		t.Errorf("%d bytes, %v", len(b), err)
	}
	if _, err := readFile("/proc/self/maps", 10); err != ErrTooLarge {
		t.Errorf("beyond the limit: %v", err)
	}
	if _, err := readFile("/dev/null", 10); err != ErrNotRegular {
		t.Errorf("device: %v", err)
	}
}

func FuzzAccounts(f *testing.F) {
	f.Add([]byte("root:x:0:0:r:/root:/bin/sh\nalice:x:1:2:::\n"), []byte("root:x:0:\nstaff:x:50:alice,bob\n"), "alice:staff")
	f.Add([]byte(":::::::\n#\n\r\n"), []byte(":::\nx:x:99999999999:,,,\n"), "5:")
	dir := f.TempDir()
	a := Accounts{Passwd: dir + "/passwd", Group: dir + "/group"}
	f.Fuzz(func(t *testing.T, passwd, group []byte, spec string) {
		if os.WriteFile(a.Passwd, passwd, 0o600) != nil || os.WriteFile(a.Group, group, 0o600) != nil {
			t.Skip("no space for the files")
		}
		id, err := a.Lookup(spec)
		if err == nil && (id.UID == 1<<32-1 || id.GID == 1<<32-1 || len(id.Groups) > maxGroups) {
			t.Errorf("%+v", id)
		}
		(&nameCache{accounts: a}).names(id.UID, id.GID)
	})
}
